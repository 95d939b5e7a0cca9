"""Registration of operators with torch, as `torch.ops.fusewise.<name>`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_library = torch.library.Library("fusewise", "FRAGMENT")

# Before torch 2.13 (seen with 2.11), if a torch.compile graph mutates an input through any operator and the input has a
# storage offset, a copy or view of it may be read from the wrong place, even out of bounds. This cannot be detected
# while tracing. Writes by torch's own copy_ are correct.
_COPIES_WRONGLY = TorchVersion(torch.__version__) < TorchVersion("2.13")


def copies_wrongly() -> bool:
    """Whether a graph is being traced in which an operator must not mutate the caller's tensors (see above)."""
    return _COPIES_WRONGLY and torch.compiler.is_compiling()


def with_tail(x: Tensor) -> Tensor:
    """x for an operator that writes to it: in a traced graph with a last dimension of 1, which the operator drops
    (`without_tail`). Torch (seen with 2.13) takes the storage offset of a part of a graph's input for its start within the
    input, if it has the same strides and as many dimensions: with an input that has an offset, the graph would write elsewhere."""
    return x.unsqueeze(-1) if torch.compiler.is_compiling() and type(x) is Tensor else x


def without_tail(x: Tensor, rank: int) -> Tensor:
    """The tensor of `rank` dimensions that was given to `with_tail`."""
    return x.squeeze(-1) if x.dim() > rank else x


def _storage_offset(x: Any) -> Any:
    """Inductor's value of `aten.sym_storage_offset`: an expression, or an int."""
    value = sys.modules["torch._inductor.virtualized"].V.graph.current_node.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def _lower_storage_offsets() -> None:
    """Give Inductor, if it is loaded, the lowering of `aten.sym_storage_offset` that it lacks (seen with torch 2.13).
    Without one it takes 0: a part of a tensor that an operator mutates, at a distance from the start that is a symbol, is
    written at the start instead."""
    lowering = sys.modules.get("torch._inductor.lowering")
    offset = torch.ops.aten.sym_storage_offset.default
    if lowering is not None and offset not in getattr(lowering, "lowerings", {offset}):
        lowering.register_lowering(offset)(_storage_offset)


def register(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    recorded: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator that needs exact strides, with one implementation for all devices, a fake implementation, and
    an optional vmap rule.

    The implementation runs without recording gradients: autograd functions wrap the operators. An exported graph has
    lost these wrappers, while its parameters may require gradients: `recorded` is the same call through an autograd function.
    """

    def below_autograd(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        torch._C._set_grad_enabled(False)  # like torch.no_grad(), at an eighth of its host overhead
        try:
            return function(*args)
        finally:
            torch._C._set_grad_enabled(True)

    def traced(*args: Any) -> Any:
        _lower_storage_offsets()  # Inductor is loaded before it traces the graph that it lowers
        return fake(*args)

    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, below_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusewise::{name}", traced, lib=_library)
    if recorded is not None:

        def at_autograd(keys: Any, *args: Any) -> Any:
            for place in lists:
                if args[place] is None:
                    args = *args[:place], [], *args[place + 1 :]
            if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return recorded(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

        _library.impl(name, at_autograd, "Autograd", with_keyset=True)
    if vmap is not None:
        torch.library.register_vmap(f"fusewise::{name}", vmap, lib=_library)
    operator = getattr(torch.ops.fusewise, name).default
    # The runtime of an AOTInductor package passes None for a list without entries (seen with torch 2.13).
    lists = [place for place, a in enumerate(operator._schema.arguments) if isinstance(a.type, torch.ListType)]
    return operator
