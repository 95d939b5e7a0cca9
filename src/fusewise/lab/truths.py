"""The float64 results of a group, computed once for all providers of a study on a CPU, where they take as long as much else.

One folder a task: `meta.json` with shapes and what `truth.py` knows of eager code's results, and the numbers as they are in
memory. Eager code's own process writes it, none that has run anybody else's code; all others read it, or compute for
themselves where there is none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .problem import Task

#: Bytes of a task's results; of larger ones every provider computes its own.
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Truths:
    """Where they are, and whether this process may add to them."""

    folder: Path
    keeps: bool = False

    def _place(self, task: Task) -> Path:
        text = json.dumps(task.to_json(), sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:24]

    def found(self, task: Task) -> tuple[list[Tensor], tuple[float, ...]] | None:
        """The results and what is known of eager code's, if they are kept."""
        place = self._place(task)
        try:
            meta = json.loads((place / "meta.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        tensors = []
        for number, shape in enumerate(meta["shapes"]):
            if math.prod(shape):
                # copied on write, so that nobody changes them for another
                array = np.memmap(place / str(number), dtype=np.float64, mode="c", shape=tuple(shape))
                tensors.append(torch.from_numpy(array))
            else:
                tensors.append(torch.empty(shape, dtype=torch.float64))
        return tensors, tuple(meta["eager"])

    def keep(self, task: Task, tensors: Sequence[Tensor], eager: tuple[float, ...]) -> None:
        """Keep what was computed, all of it or nothing; not what is no float64 on a CPU, too large or not finite."""
        size = sum(x.numel() * x.element_size() for x in tensors)
        plain = all(x.device.type == "cpu" and x.dtype == torch.float64 for x in tensors)
        if not self.keeps or not plain or size > MOST_BYTES or not all(map(math.isfinite, eager)):
            return
        made = self.folder / "nothing"
        try:
            made = Path(tempfile.mkdtemp(dir=self.folder))
            for number, x in enumerate(tensors):
                x.detach().contiguous().numpy().tofile(made / str(number))
            meta = {"shapes": [list(x.shape) for x in tensors], "eager": list(eager)}
            (made / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            os.rename(made, self._place(task))
        except OSError:  # a full disk, or someone was first: the results are computed again where they are needed
            shutil.rmtree(made, ignore_errors=True)
