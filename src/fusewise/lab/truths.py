"""Cache of float64 results, computed once per group and shared by all worker processes of a study. Only on a CPU, where
computing them takes a large share of the time.

One folder per task: `meta.json` with shapes and eager's errors, and one raw array per tensor. Only eager's worker
writes, because it runs no third-party code. The other workers read, and compute the results themselves if they are
absent.
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

#: Size limit of a task's results; beyond it every provider computes its own.
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Truths:
    """Where the cache is, and whether this process may add to it."""

    folder: Path
    keeps: bool = False

    def _place(self, task: Task) -> Path:
        text = json.dumps(task.to_json(), sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:24]

    def found(self, task: Task) -> tuple[list[Tensor], tuple[float, ...]] | None:
        """The cached results and eager's errors, if present."""
        place = self._place(task)
        try:
            meta = json.loads((place / "meta.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        tensors = []
        for number, shape in enumerate(meta["shapes"]):
            if math.prod(shape):
                # copy-on-write, so that no caller changes the cached values
                array = np.memmap(place / str(number), dtype=np.float64, mode="c", shape=tuple(shape))
                tensors.append(torch.from_numpy(array))
            else:
                tensors.append(torch.empty(shape, dtype=torch.float64))
        return tensors, tuple(meta["eager"])

    def keep(self, task: Task, tensors: Sequence[Tensor], eager: tuple[float, ...]) -> None:
        """Write the results, atomically. Skips anything not float64 on a CPU, too large, or with non-finite errors of
        eager."""
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
        except OSError:  # disk full, or another process was first: the results are recomputed where needed
            shutil.rmtree(made, ignore_errors=True)
