"""How operators are registered with torch, as `torch.ops.fusewise.<name>`: one way for every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

_library = torch.library.Library("fusewise", "FRAGMENT")

# Before torch 2.13 (seen with 2.11) graphs of torch.compile that write into an input through an operator, whichever it is, may
# take a copy or a view of it from the wrong place, even from outside its memory, where it does not begin with its storage.
# A trace does not see that. Writes by torch's own copy_ are right.
_COPIES_WRONGLY = TorchVersion(torch.__version__) < TorchVersion("2.13")


def copies_wrongly() -> bool:
    """Whether a graph is traced in which an operator must not write into the tensors of the caller."""
    return _COPIES_WRONGLY and torch.compiler.is_compiling()


def register(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    recorded: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator that looks at exact strides, with its function for every device and for fake tensors, and its
    rule for vmap if it has one.

    The function runs without recording gradients: autograd lies outside the operators. An exported graph has lost what lies
    outside, and its nodes may have parameters that require gradients: `recorded` is the same call through an autograd function.
    """

    def below_autograd(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        torch._C._set_grad_enabled(False)  # torch.no_grad(), at an eighth of its cost on the host
        try:
            return function(*args)
        finally:
            torch._C._set_grad_enabled(True)

    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, below_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusewise::{name}", fake, lib=_library)
    if recorded is not None:

        def at_autograd(keys: Any, *args: Any) -> Any:
            if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return recorded(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

        _library.impl(name, at_autograd, "Autograd", with_keyset=True)
    if vmap is not None:
        torch.library.register_vmap(f"fusewise::{name}", vmap, lib=_library)
    operator = getattr(torch.ops.fusewise, name).default
    return operator
