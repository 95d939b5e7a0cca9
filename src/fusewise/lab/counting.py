"""Counts, while a function runs, the FLOPs of its operators and the length of its longest sum.

The length of the sum sets the tolerance for another order of summation. Adding n terms sequentially with unit roundoff
u gives a relative error of about 0.3 · √n · u (independent roundings; Higham and Mary, 2019, doi:10.1137/18M1226312);
blocked summation gives less, and neither is wrong. So the allowed difference from eager code grows with √n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from .code.aten import ALIKE, INDEXED, OVERWRITE, RESERVE
from .flops import FACTORISATIONS, TRANSFORMS, in_view, of_transform, products, uncounted
from .modes import Mode, Result, under
from .reads import Call, Reads, position
from .reads import storage as memory

#: Cap on the length of a sum: libraries sum in blocks and GPU threads a part each, and a tight tolerance still detects
#: a missing block.
MOST_TERMS = 2**16
#: Reductions, by operator. Terms per sum: elements of the largest argument over elements of the smallest result.
REDUCTIONS = {
    "sum", "nansum", "mean", "prod", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "trace",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_fused_rms_norm", "_fused_rms_norm_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "nll_loss_forward", "nll_loss2d_forward",
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward",
    "binary_cross_entropy", "binary_cross_entropy_with_logits",
}  # fmt: skip
#: Shape-preserving reductions, which sum along one dimension of the first argument: the position of `dim` in the call.
ALONG = {
    "_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2, "cumsum": 1, "logcumsumexp": 1,
}  # fmt: skip


#: A complex multiply-add is eight real FLOPs; the formulas count two.
COMPLEX_FLOPS = 4


class Counter(Mode):
    """Counts operators while active.

    `flops`: of products, convolutions, factorisations and Fourier transforms. `terms`: length of the longest sum in one
    operator, 1 if nothing is summed. Unknown operators count as no sum, which can only tighten the tolerance.
    `uncounted`: operators whose FLOPs are unknown. `reads`: what is read of memory allocated before, if asked for.
    """

    def __init__(self, compiled: bool = False, reads: bool = False) -> None:
        super().__init__(compiled)
        self.products = products()
        self.flops, self.terms = 0, 1
        self.uncounted: dict[str, None] = {}
        self.reads = Reads() if reads else None
        self.inside: set[int] = set()
        #: Weak references to all memory seen. What a backward frees would else give its identity to what comes next.
        self.seen: dict[int, StorageWeakRef] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(func, "overloadpacket", func)
        formula = self.products.get(packet)
        if formula is None and isinstance(func, torch._ops.OpOverload) and _is_made_of_others(func):
            with self:  # inference mode does not decompose composite operators
                return func.decompose(*args, **kwargs)
        if str(func) == "cond":  # counted by the branch that is taken
            condition, *branches = args[:3]
            with self:
                return branches[0 if condition else 1](*args[3])
        result = func(*args, **kwargs)
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        outputs = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.numel()]
        if self.reads is not None:
            self._look(self.reads, func, Call(args, kwargs, outputs), inputs)
        if inputs and uncounted(func, formula is not None, inputs):
            self.uncounted[str(packet)] = None
        if not inputs or not outputs:
            return result
        name, flops, terms = getattr(packet, "__name__", ""), 0, 1
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))  # two FLOPs per term
            terms = flops // (2 * min(y.numel() for y in outputs if y.ndim == outputs[0].ndim))
            flops = in_view(func, args, kwargs, flops)
        elif name in FACTORISATIONS:
            which, count = FACTORISATIONS[name]
            flops, terms = count(args[which], outputs), max(args[which].shape[-2:])
        elif name in TRANSFORMS:
            self.flops += of_transform(name, inputs[0], outputs[0], args[1])
        else:
            terms = _reduced(name, inputs, outputs, args, kwargs)
        self.flops += COMPLEX_FLOPS * flops if any(x.is_complex() for x in inputs) else flops
        self.terms = min(MOST_TERMS, max(self.terms, terms))
        return result

    def _look(self, reads: Reads, func: Any, call: Call, inputs: Sequence[Tensor]) -> None:
        """Record what is read from outside memory, and what is allocated here."""
        inputs, outputs = (
            [x for x in some if x.layout == torch.strided and not x.is_nested] for some in (inputs, call.outputs)
        )
        before = {memory(x) for x in inputs}
        for x in (*inputs, *outputs):
            self.seen.setdefault(memory(x), StorageWeakRef(x.untyped_storage()))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if not getattr(func, "is_view", False) and name not in ALIKE | RESERVE:
            place = position(name)
            partly = call.args[place] if place is not None and len(call.args) > place else None
            unread = call.args[0] if name in OVERWRITE | INDEXED and call.args else None
            for x in inputs:
                if memory(x) not in self.inside and x is not unread:
                    reads.add(x, name, call if x is partly else None)
        self.inside |= {memory(y) for y in outputs} - before - reads.largest.keys()


def counted(call: Callable[[], Result], reads: bool = False) -> tuple[Result, Counter]:
    """The result of the call, and its counter."""
    return under(functools.partial(Counter, reads=reads), call)


def _is_made_of_others(func: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _reduced(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> int:
    """Terms per sum of a reduction; 1 for other operators."""
    if name in REDUCTIONS:
        return max(x.numel() for x in inputs) // min(y.numel() for y in outputs)
    if name in ALONG:
        named = args[ALONG[name]] if len(args) > ALONG[name] else kwargs.get("dim")
        return inputs[0].shape[named] if isinstance(named, int) and inputs[0].ndim else 1
    return 1
