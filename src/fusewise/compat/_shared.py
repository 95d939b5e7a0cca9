"""What several libraries' conventions have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import check_count, dtype_name, fail, unit_stride
from ..ops.rope import rope


def check_tensor(op: str, name: str, x: object) -> None:
    """Check that x is a tensor, in a function that looks into it before `rope` would."""
    if not isinstance(x, Tensor):
        fail(op, name, "be a torch.Tensor", type(x).__name__, f"pass a tensor for {name}", TypeError)


def alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both tables with the same strides: themselves, or copies in the rare case that they were not made together. What is no
    tensor comes back as it is, for `rope` to name."""
    try:
        return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())
    except AttributeError:
        return cos, sin


def heads(op: str, name: str, x: Tensor, dims: int, head_size: int) -> Tensor:
    """x, of `dims` dimensions and (heads, head_size) or (heads · head_size,), as (…, heads, head_size), a view."""
    check_tensor(op, name, x)
    check_count(op, "head_size", head_size)
    if x.dim() == dims + 2 and x.shape[-1] == head_size:
        return x
    if x.dim() != dims + 1 or x.shape[-1] % head_size:
        fail(
            op, name, f"have the shape of positions and (heads, {head_size}) or (heads · {head_size},)",
            tuple(x.shape), "check head_size and the shape of positions",
        )  # fmt: skip
    return x.view(*x.shape[:-1], x.shape[-1] // head_size, head_size)


def complex_tables(freqs_cis: Tensor) -> dict[str, Tensor]:
    """The tables of complex numbers cos θ + i sin θ, views of them unless they are lazily conjugated."""
    check_tensor("rope", "freqs_cis", freqs_cis)
    if not freqs_cis.is_complex():
        kind = dtype_name(freqs_cis.dtype)
        fail("rope", "freqs_cis", "be complex, cos θ + i sin θ", kind, "pass the model's freqs_cis", TypeError)
    freqs_cis = freqs_cis.resolve_conj()
    return {"cos": freqs_cis.real, "sin": freqs_cis.imag}


def pairing(interleaved: bool) -> Any:
    """The pairing of `rope` that a library's flag stands for."""
    return "interleaved" if interleaved else "half"


def rotate_pair(q: Tensor, k: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    """`rope`, always a pair: (q, None) without a k."""
    if k is None:
        return rope(unit_stride(q), **arguments), None
    rotated: tuple[Tensor, Tensor] = rope(unit_stride(q), unit_stride(k), **arguments)
    return rotated


def rotate_multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Any, layout: Any
) -> tuple[Tensor, Tensor | None]:
    """M-RoPE from tables (3, B, T, 2P) that hold the temporal, height and width angles of every token.

    The three tables are rows of one: token t of sequence b has row (axis · B + b) · T + t. Those rows are one small
    int32 tensor, a kernel of its own.
    """
    check_tensor("rope", "cos", cos)
    check_tensor("rope", "sin", sin)
    if cos.dim() != 4 or cos.shape[0] != 3:
        fail("rope", "cos", "have shape (3, B, T, 2P)", tuple(cos.shape), "pass the tables of the three axes")
    axes, batch, tokens = cos.shape[:3]
    rows = torch.arange(axes * batch * tokens, dtype=torch.int32, device=cos.device).view(axes, batch, tokens)
    return rotate_pair(
        q, k, cos=cos.flatten(0, 2), sin=sin.flatten(0, 2), positions=rows, sections=tuple(sections), layout=layout,
        rotary_dim=cos.shape[-1],
    )  # fmt: skip
