"""The registered operators and their dispatch to an implementation. Torch only; for inference, so no autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._choice import Choice
from .._register import copies_wrongly, register
from ..rope import _host
from ..rope._op import _COMMON as ROTATION
from ..rope._op import rotate
from . import _native

# In order of preference. Each has `launch`, with the arguments of `CacheProblem.build`.
IMPLEMENTATIONS = ("triton", "cuda", "reference")
choice = Choice("rope_and_cache", IMPLEMENTATIONS)

_CACHES = "Tensor v, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor? slots, Tensor? block_table"


def _run(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any, write_k: bool) -> None:
    *call, impl = rest
    implementation = choice.serving(impl, q.device.type, q.dtype)
    implementation.launch(q, k, v, key_cache, value_cache, *call, write_k)
    _host.served(implementation, q.device.type, impl)
    written = (q, k, key_cache, value_cache) if write_k else (q, key_cache, value_cache)
    # Autograd does not see a write through a pointer.
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _writing_k(*arguments: Any) -> None:
    _run(*arguments, write_k=True)


def _keeping_k(*arguments: Any) -> None:
    _run(*arguments, write_k=False)


def _nothing(*_: Any) -> None:
    return None


# Two operators, so that the schema says whether k is written to. The arguments that they share with those of rope are
# described there; slots and block_table in `CacheProblem`.
_writing = register(f"rope_and_cache_(Tensor(a!) q, Tensor(b!) k, {_CACHES}, {ROTATION}) -> ()", _writing_k, _nothing)
_keeping = register(
    f"rope_and_cache_keep_k_(Tensor(a!) q, Tensor k, {_CACHES}, {ROTATION}) -> ()", _keeping_k, _nothing
)


def write(tensors: tuple[Any, ...], call: tuple[Any, ...], write_k: bool) -> None:
    """Run a validated call: q, k, v, the caches, slots and block_table, and the common arguments of rope's operators."""
    if not copies_wrongly():
        (_writing if write_k else _keeping)(*tensors, *call)
        return
    q, k, _, key_cache, value_cache = tensors[:5]
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.untyped_storage().size() != cache.numel() * cache.element_size():
            raise ValueError(
                f"rope_and_cache_: {name} must be all of its memory under torch.compile before torch 2.13, whose copies of "
                "parts are wrong, got a part; allocate the caches apart, or call it outside of the graph"
            )
    rotated = q.clone()
    _keeping(rotated, *tensors[1:], *call)
    q.copy_(rotated)
    if write_k:
        k.copy_(rotate(k, None, call))


def remember(
    arguments: tuple[Any, ...], tensors: tuple[Any, ...], call: tuple[Any, ...], write_k: bool, reach: float
) -> None:
    """Keep a call that has just succeeded, if native code served it: `arguments` those of `_host.rope_and_cache_`, the others
    of `write`, and the largest int offset for which it was validated."""
    q, impl = tensors[0], call[-1]
    if _host.without(impl):
        return
    host = _host.keeper(_host.CACHED, arguments, choice.serving(impl, q.device.type, q.dtype), impl)
    if host is not None:
        plan = _native.planned(*tensors, *call[:-1], write_k)
        host.remember(_host.CACHED, arguments, *plan, reach, (-1, 0, 0), [], "", "")  # there are no gradients
