"""float64 references for the functions of every library, and the tolerances of the tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, start: int = 0, interleaved: bool = False, to_half: bool = False
) -> Tensor:
    """Reference: x in float64, the pairs of its 2P features from `start` multiplied as complex numbers by cos + i sin (…, P)."""
    x = x.double()
    width = 2 * cos.shape[-1]
    before, part, after = x[..., :start], x[..., start : start + width], x[..., start + width :]
    pairs = part.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(a, b) * torch.complex(cos.double(), sin.double())
    joined = (turned.real, turned.imag)
    y = torch.stack(joined, -1).flatten(-2) if interleaved and not to_half else torch.cat(joined, -1)
    return torch.cat((before, y, after), -1)


def assert_rotated(actual: Tensor, expected: Tensor, angle_error: float = 0.0) -> None:
    """Allow one rounding to the dtype of `actual`, plus float32 arithmetic and an angle error (in radians)."""
    dtype = actual.dtype if actual.dtype != torch.float64 else torch.float32
    atol = (8 * torch.finfo(torch.float32).eps + angle_error) * max(float(expected.detach().abs().max()), 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=atol)


def assert_gradient(output: Any, x: Tensor, statement: Any) -> None:
    """Check that x gets the same gradient through `output` and `statement`, a function of x, for random cotangents."""
    outputs = output if isinstance(output, tuple) else (output,)
    cotangents = [torch.randn_like(y) for y in outputs]
    given = [dy.clone() for dy in cotangents]
    (dx,) = torch.autograd.grad(outputs, x, cotangents)
    for dy, before in zip(cotangents, given, strict=True):
        assert torch.equal(dy, before), "an incoming gradient was overwritten"
    leaf = x.detach().double().requires_grad_()
    expected = statement(leaf)
    expected = expected if isinstance(expected, tuple) else (expected,)
    (dx64,) = torch.autograd.grad(expected, leaf, [dy.double() for dy in given])
    assert_rotated(dx, dx64)


VIEWS = {
    "view", "_unsafe_view", "select", "slice", "narrow", "unsqueeze", "squeeze", "transpose", "permute", "expand", "split",
    "split_with_sizes", "unflatten", "flatten", "detach", "alias", "as_strided", "unbind", "t", "view_as_real", "_conj",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Count operators that launch kernels: all except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace != "aten" or name not in VIEWS:
            self.count[f"{namespace}::{name}"] += 1
        return func(*args, **(kwargs or {}))


def launches(function: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    with Launches() as mode:
        function(*args, **kwargs)
    return dict(mode.count)


def assert_transforms(function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Check torch.func transforms and batched gradients of `function` (may be in place on x) against autograd."""
    call = lambda x: results if isinstance(results := function(x), tuple) else (results,)  # noqa: E731
    loss = lambda x: sum((y**3).sum() for y in call(x * 1))  # noqa: E731
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), want)
    torch.testing.assert_close(torch.func.grad(lambda x: sum((y**3).sum() for y in call(x)))(x.clone()), want)
    mapped = torch.func.vmap(torch.func.grad(loss))(torch.stack((x, 2 * x)))
    torch.testing.assert_close(mapped, torch.stack((want, 4 * want)))
    many = torch.stack((x, 2 * x))
    for ys, once, twice in zip(torch.func.vmap(call)(many), call(x.clone()), call(2 * x), strict=True):
        torch.testing.assert_close(ys, torch.stack((once, twice)))
    _, tangents = torch.func.jvp(lambda x: call(x * 1), (x,), (x,))
    for tangent, y in zip(tangents, call(x.clone()), strict=True):
        torch.testing.assert_close(tangent, y)
    ys = call(leaf * 1)
    dys = [torch.randn(3, *y.shape, device=y.device) for y in ys]
    (batch,) = torch.autograd.grad(ys, leaf, dys, is_grads_batched=True, retain_graph=True)
    for i, dx in enumerate(batch):
        torch.testing.assert_close(dx, torch.autograd.grad(ys, leaf, [dy[i] for dy in dys], retain_graph=True)[0])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def assert_same(ours: Any, statement: Any, leaves: list[Tensor], products: int = 0) -> None:
    """Check results and gradients of `ours` against `statement` in float64: within one rounding for the gate, plus one per
    matmul."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y, true = ours(*leaves), statement(*wide)
    dy = torch.randn_like(y)
    given = dy.clone()
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    expected = [true, *torch.autograd.grad(true, wide, given.double())]
    assert torch.equal(dy, given), "an incoming gradient was overwritten"
    for result, exact in zip(found, expected, strict=True):
        eps = torch.finfo(y.dtype).eps
        size = float(exact.detach().abs().max())
        atol = 8 * torch.finfo(torch.float32).eps * max(size, 1.0) + products * eps * size
        assert result.dtype == y.dtype
        torch.testing.assert_close(result.double(), exact, rtol=0.51 * eps, atol=atol)


FORM = re.compile(r"\w+: [\w. ]+ must .+, got .+; .+", re.DOTALL)


def check_named(function: Any, arguments: dict[str, Any], **wrong: Any) -> str:
    """Call with invalid arguments, check the form of the error message and return it."""
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**{**arguments, **wrong})
    assert FORM.fullmatch(str(raised.value))
    return str(raised.value)
