"""How many terms the sums of a computation have, read off the operators of eager code while they run.

Another order of summation is another rounding. Who adds n terms one after another into a number of unit roundoff u is off
by about 0.4 · √n · u of the sum (the roundings are independent; Higham and Mary, 2019, doi:10.1137/18M1226312), who adds
them in blocks by less, and neither is wrong. So what is allowed to differ from eager code grows with √n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise.ops.gated_linear.flops import register_flop_formulas

#: Longer sums are counted as so long: a library adds them in blocks, or a GPU's threads a part each, and a sharp rule finds
#: a block that is missing.
MOST_TERMS = 2**16
#: Reductions, by operator: an element of the smallest result is a sum over as many of the largest argument's.
REDUCTIONS = {
    "sum", "nansum", "mean", "prod", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "dot", "vdot", "mv", "addmv",
    "trace", "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_fused_rms_norm", "_fused_rms_norm_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "nll_loss_forward", "mse_loss",
}  # fmt: skip
#: Reductions that keep the shape: the sum runs along a dimension of the first argument; where the call names it.
ALONG = {
    "_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2, "cumsum": 1, "logcumsumexp": 1,
}  # fmt: skip


def know_products() -> None:
    """Tell PyTorch's counter of what it leaves out: our own operations, and attention on a CPU."""
    register_flop_formulas()
    aten, known = torch.ops.aten, flop_counter.flop_registry
    for suffix in ("", "_backward"):
        attention = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}")
        known.setdefault(attention, known[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")])


class LongestSum(TorchDispatchMode):
    """While it is entered it counts: `terms` is the length of the longest sum of an operator so far, 1 where nothing is summed.
    Operators that it does not know count as none, which makes the rule sharper and never blunter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        know_products()
        self.terms = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.terms = min(MOST_TERMS, max(self.terms, _terms(func, args, kwargs or {}, result)))
        return result


def _terms(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", "")
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
    made = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.numel()]
    if not given or not made:
        return 1
    if name in ALONG:
        named = args[ALONG[name]] if len(args) > ALONG[name] else kwargs.get("dim")
        return given[0].shape[named] if isinstance(named, int) and given[0].ndim else 1
    if name in REDUCTIONS:
        return max(x.numel() for x in given) // min(y.numel() for y in made)
    if (flops := flop_counter.flop_registry.get(packet)) is not None:  # a multiplication and an addition a term
        products = min(y.numel() for y in made if y.ndim == made[0].ndim)
        count: int = flops(*args, **kwargs, out_val=result)
        return count // (2 * products)
    return 1
