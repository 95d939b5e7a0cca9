"""Bound launches of Triton's kernels are for the strides that were checked: a program that torch.export made guards only shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise.ops.qk_norm_rope._problem import Norm
from fusewise.ops.rope._problem import Spec

from .rope.support import INTERPRETER

pytest.importorskip("triton")
from fusewise.ops.qk_norm_rope import _triton as norm
from fusewise.ops.rope import _triton as rope
from fusewise.ops.rope_and_cache import _triton as cache

Q, K, V = (torch.randn(6, heads, 16) for heads in (4, 2, 2))
CACHE = torch.zeros(2, 8, 2, 16)
ROTATION: dict[str, Any] = {
    "cos": torch.randn(16, 8), "sin": torch.randn(16, 8), "positions": None, "offset": torch.tensor([3, 5]),
    "cu_seqlens": torch.tensor([0, 2, 6]), "first": 0, "spec": Spec(layout="thd").encode(),
}  # fmt: skip
LAUNCHES: dict[str, Callable[..., Any]] = {
    "rope": lambda *rotation: rope.launch((Q, K), (torch.empty_like(Q), torch.empty_like(K)), rotation),
    "qk_norm_rope": lambda *rotation: norm.forward([Q], [torch.empty_like(Q)], [], rotation, Norm(1e-6, 0.0, "head")),
    "rope_and_cache_": lambda *rotation: cache.launch(Q, K, V, CACHE, CACHE.clone(), None, None, *rotation, True),
}


class Compiled:
    """Stands in for a compiled kernel."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *values, stream: None


@pytest.mark.skipif(INTERPRETER, reason="the interpreter has no launches to bind")
@pytest.mark.parametrize("name", ["sin", "offset", "cu_seqlens"])
@pytest.mark.parametrize("op", LAUNCHES)
def test_other_strides_are_checked_again(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rope, norm, cache):
        monkeypatch.setattr(module, "_PLANS", {})
    for module in (rope, cache):
        monkeypatch.setattr(module, "_launch_unbound", lambda problem: Compiled())
    monkeypatch.setattr(norm, "_launch", lambda *arguments: (Compiled(), 1, ()))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    for _ in range(2):  # the second is bound
        LAUNCHES[op](*ROTATION.values())
    strided: Tensor = ROTATION[name].repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=rf"{name} must have (a contiguous last dimension|the strides of cos)"):
        LAUNCHES[op](*{**ROTATION, name: strided}.values())
