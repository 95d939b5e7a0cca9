"""Registered operators of `rope_and_cache_` and their dispatch. Imports only torch; inference only, so no autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._shared import build
from .._choice import Choice
from .._common import KERNEL_FLOATS
from .._register import copies_wrongly, register, with_tail, without_tail
from ..rope import _host
from ..rope._auto import COMPUTED_ANGLES, table_of
from ..rope._op import ROTATION, fake_writing, rotate
from ..rope._problem import Spec, rotated_rank
from . import _native

# In order of preference, except that on a GPU auto selects CUDA once its library is built. Each has `launch`, with the
# arguments of `CacheProblem.build`.
IMPLEMENTATIONS = ("triton", "cuda", "reference")
choice = Choice("rope_and_cache_", IMPLEMENTATIONS)

_CACHES = "Tensor v, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor? slots, Tensor? block_table"


def serving(impl: str, q: Tensor, spec: str) -> Any:
    """The module that serves a call with `impl`, which may be "auto". A named one never falls back."""
    if impl == "auto" and q.device.type == "cuda" and q.dtype in KERNEL_FLOATS:
        impl = "auto" if _passes_cuda_over(Spec.decode(spec).table) else "cuda"
    return choice.serving(impl, q.device.type, q.dtype)


def _passes_cuda_over(table: str) -> str | None:
    """Why auto does not select CUDA for a call on a GPU, or None if it does. In the published rows it is faster in
    every case, by least at the largest size, and its host overhead is a tenth."""
    if (reason := choice.unready(build.loads())) is not None:
        return reason
    return COMPUTED_ANGLES if table in ("angles", "inv_freq") else None


def explained(arguments: Mapping[str, Any]) -> tuple[str, str, dict[str, str]] | None:
    """As `explained` of RoPE's `_auto`, for the arguments of `rope_and_cache_`."""
    q = arguments["q"]
    if q.device.type != "cuda" or q.dtype not in KERNEL_FLOATS:
        return None
    reason = _passes_cuda_over(table_of(arguments))
    if reason is None:
        return "cuda", "which is faster and has the lowest host overhead", {"triton": "cuda is faster"}
    chosen = choice.choose("cuda", q.dtype)
    return None if chosen != "triton" else ("triton", "the first that serves the tensors", {"cuda": reason})


def without_tails(arguments: list[Any]) -> list[Any]:
    """The arguments of an operator without impl, the written tensors as they are outside of a traced graph."""
    q, k, v, key_cache, value_cache, *rest = arguments
    rank = rotated_rank(rest[-1])
    q, k = without_tail(q, rank), without_tail(k, rank)
    return [q, k, v, without_tail(key_cache, 4), without_tail(value_cache, 4), *rest]


def _run(*arguments: Any, write_k: bool) -> None:
    *given, impl = arguments
    q, k, v, key_cache, value_cache, *call = without_tails(given)
    implementation = serving(impl, q, call[-1])
    implementation.launch(q, k, v, key_cache, value_cache, *call, write_k)
    _host.served(implementation, q.device.type, impl)
    written = (q, k, key_cache, value_cache) if write_k else (q, key_cache, value_cache)
    # Autograd does not see writes through a pointer.
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _writing_k(*arguments: Any) -> None:
    _run(*arguments, write_k=True)


def _keeping_k(*arguments: Any) -> None:
    _run(*arguments, write_k=False)


# Two operators, so that the schema declares whether k is mutated. The arguments shared with rope's operators are
# described there; slots and block_table in `CacheProblem`.
_writing = register(
    f"rope_and_cache_(Tensor(a!) q, Tensor(b!) k, {_CACHES}, {ROTATION}) -> ()", _writing_k,
    fake_writing("rope_and_cache_", {"q": 0, "k": 1, "key_cache": 3, "value_cache": 4}),
)  # fmt: skip
_keeping = register(
    f"rope_and_cache_keep_k_(Tensor(a!) q, Tensor k, {_CACHES}, {ROTATION}) -> ()", _keeping_k,
    fake_writing("rope_and_cache_", {"q": 0, "key_cache": 3, "value_cache": 4}),
)  # fmt: skip


def write(tensors: tuple[Any, ...], call: tuple[Any, ...], write_k: bool) -> None:
    """Run a validated call: q, k, v, the caches, slots and block_table, and the common arguments of rope's operators."""
    if not copies_wrongly():
        q, k, v, *caches = tensors[:5]
        written = with_tail(q), with_tail(k) if write_k else k, v, *map(with_tail, caches)
        (_writing if write_k else _keeping)(*written, *tensors[5:], *call)
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
    """Cache a call that has just succeeded, if native code served it: the `arguments` of `_host.rope_and_cache_`, those
    of `write`, and the largest int offset for which it is valid."""
    q, impl = tensors[0], call[-1]
    if _host.without(impl):
        return
    host = _host.keeper(_host.CACHED, arguments, serving(impl, q, call[-2]), impl)
    if host is not None:
        plan = _native.planned(*tensors, *call[:-1], write_k)
        host.remember(_host.CACHED, arguments, *plan, reach, (-1, 0, 0), [], "", "")  # there are no gradients
