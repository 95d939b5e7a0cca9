"""A call that passed is known by everything that was checked, in every operation that rotates: the same call again is not checked
and gives the same, and one in which a single tensor differs is checked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.qk_norm_rope import _validate as qk_norm_rope
from fusewise.ops.rope import _validate as rope
from fusewise.ops.rope_and_cache import _validate as rope_and_cache

from .rope.support import make_table

Q, K, V = (torch.randn(6, heads, 16) for heads in (4, 2, 2))
CACHE = torch.zeros(2, 2, 8, 2, 16)
CU, IDS, WEIGHT = torch.tensor([0, 2, 6]), torch.arange(6), torch.ones(16)
# What each operation takes, and of the tensors that exclude each other one form.
OPERATIONS: dict[Callable[..., Any], dict[str, Tensor]] = {
    fusewise.rope: {"q": Q, "k": K},
    fusewise.qk_norm_rope: {"q": Q, "k": K, "q_weight": WEIGHT, "k_weight": WEIGHT},
    fusewise.rope_and_cache_: {"q": Q, "k": K, "v": V, "key_cache": CACHE[0], "value_cache": CACHE[1]},
}
# A check of its own that each makes of a call that it does not know.
CHECKS = {
    fusewise.rope: (rope, "_check"),
    fusewise.qk_norm_rope: (qk_norm_rope, "_check_norm"),
    fusewise.rope_and_cache_: (rope_and_cache, "_check_caches"),
}
PLACES: dict[str, dict[str, Tensor]] = {
    "slot_mapping": {"slot_mapping": IDS},
    "block_table": {"block_table": torch.zeros(2, 1, dtype=torch.int64)},
}
FORMS: dict[str, dict[str, Tensor]] = {
    **{kind: make_table(kind, 8, 1, torch.float32) for kind in ("half", "fused", "angles", "inv_freq")},
    "positions": {**make_table("half", 8, 1, torch.float32), "positions": IDS},
    "offset": {**make_table("half", 8, 1, torch.float32), "offset": torch.tensor([1])},
    "sequences": {**make_table("half", 8, 1, torch.float32), "cu_seqlens": CU, "offset": torch.tensor([3, 5])},
}
CALLS = [
    pytest.param(op, {**tensors, **places, **form}, name, id=f"{op.__name__}-{kind}-{name}")
    for op, tensors in OPERATIONS.items()
    for places in (PLACES.values() if op is fusewise.rope_and_cache_ else ({},))
    for kind, form in FORMS.items()
    if "block_table" not in places or kind == "sequences"
    for name in (*form, *places, *(tensors if kind == "half" else ()))
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("op", "call", "name"), CALLS)
def test_each_tensor_is_looked_at_again(
    op: Callable[..., Any], call: dict[str, Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"layout": "thd", **({"eps": 0.5, "weight_offset": 0.25} if op is fusewise.qk_norm_rope else {})}
    first = op(**call, **options) or ()
    with monkeypatch.context() as known:
        known.setattr(*CHECKS[op], lambda *_: pytest.fail("checked again"))
        again = op(**call, **options) or ()
    for y, same in zip(first, again, strict=True):
        assert torch.equal(y, same)
    with pytest.raises(TypeError, match=rf"^{op.__name__}: {name} must have (the )?dtype"):
        op(**{**call, name: call[name].bool()}, **options)
    nested = torch.nested.nested_tensor(list(call[name]))  # torch raises a RuntimeError if asked for its strides
    with pytest.raises(TypeError, match=rf"^{op.__name__}: {name} must be a strided tensor, got nested"):
        op(**{**call, name: nested}, **options)
