"""Helpers shared by the compat modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, dtype_name, fail, shown
from ..ops.gated_linear._gate import stacked_gate, stacked_gate_into
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import is_untouched
from ..ops.rope import rope
from ._check import WRONG, check_tensor, explain, flag, shape_of


def unit_stride(x: Tensor, name: str = "q", op: str = "rope") -> Tensor:
    """Return x with a contiguous last dimension; copy only if needed."""
    try:
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    except WRONG:
        explain(op, name, x, 1)
        raise


def alike(op: str, cos: Tensor, sin: Tensor, of: str = "") -> tuple[Tensor, Tensor]:
    """Return both tables (arguments cos{of} and sin{of}) with equal strides; copy only if their strides differ."""
    try:
        return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())
    except WRONG:
        explain(op, f"cos{of}", cos)
        explain(op, f"sin{of}", sin)
        raise


def cut(op: str, cos: Tensor, sin: Tensor, view: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Apply one view to both tables, which must have the same shape: a part of a wider one would hide the difference."""
    try:
        if cos.shape == sin.shape:
            return view(cos), view(sin)
    except WRONG:
        explain(op, "cos", cos)
        explain(op, "sin", sin)
        raise
    explain(op, "cos", cos)
    explain(op, "sin", sin)
    fail(op, "sin", f"have the shape of cos, {tuple(cos.shape)}", tuple(sin.shape), "build both tables the same way")


def heads(op: str, name: str, x: Tensor, dims: int, head_size: int) -> Tensor:
    """View x as (…, heads, head_size); x has `dims` leading dimensions, then (heads, head_size) or (heads · head_size,)."""
    shape = shape_of(op, name, x)
    head_size = check_count(op, "head_size", head_size)
    if len(shape) == dims + 2 and shape[-1] == head_size:
        return x
    if len(shape) != dims + 1 or shape[-1] % head_size:
        fail(
            op, name, f"have the shape of positions and (heads, {head_size}) or (heads · {head_size},)",
            tuple(shape), "check head_size and the shape of positions",
        )  # fmt: skip
    try:
        return x.view(*shape[:-1], shape[-1] // head_size, head_size)
    except WRONG:
        explain(op, name, x)
        raise


def complex_tables(freqs_cis: Tensor, x: Tensor | None = None, tokens_dim: int | None = None) -> dict[str, Tensor]:
    """Split cos θ + i sin θ into cos and sin tables: views, unless the tensor is lazily conjugated. They must have a column
    for each pair of x, if given, whose whole heads rotate, and a row for each of its tokens, if their dimension is given."""
    check_tensor("rope", "freqs_cis", freqs_cis)
    if not freqs_cis.is_complex():
        kind = dtype_name(freqs_cis.dtype)
        fail("rope", "freqs_cis", "be complex, cos θ + i sin θ", kind, "pass the model's freqs_cis", TypeError)
    if x is not None:
        _check_pairs("freqs_cis", freqs_cis, x)
        if tokens_dim is not None and x.dim() == 4:
            check_rows("rope", "freqs_cis", freqs_cis, x.shape[tokens_dim])
    try:
        freqs_cis = freqs_cis.resolve_conj()
        return {"cos": freqs_cis.real, "sin": freqs_cis.imag}
    except WRONG:
        explain("rope", "freqs_cis", freqs_cis)
        raise


def _check_pairs(name: str, freqs: Tensor, x: Tensor) -> None:
    """Check that a table has a column for each pair of x. `rope` would take twice as many as duplicates."""
    pairs, shape = shape_of("rope", "q", x, 1)[-1] // 2, shape_of("rope", name, freqs, 1)
    if shape[-1] != pairs:
        fail("rope", name, f"have D / 2 = {pairs} columns", tuple(shape), "pass an angle for each pair of a head")


def check_rows(op: str, name: str, table: Tensor, tokens: int) -> None:
    """Check that a table has as many rows as there are tokens. `rope` would take the first rows of a longer one."""
    shape = shape_of(op, name, table, 2)
    if shape[-2] != tokens:
        fix = "select the rows of the tokens"
        fail(op, name, f"have a row for each of the {tokens} tokens", tuple(shape), fix)


def pairing(op: str, name: str, interleaved: bool) -> Any:
    """Map a library's `interleaved` flag to the `pairing` of `rope`."""
    try:
        return "interleaved" if interleaved else "half"
    except WRONG:
        flag(op, name, interleaved)
        raise


def pairing_of_neox(op: str, is_neox: bool, name: str = "is_neox_style") -> Any:
    """Map a library's flag for NeoX pairs, called `name`, to the `pairing` of `rope`."""
    return "half" if flag(op, name, is_neox) else "interleaved"


def gate_of_halves(
    op: str, x: Tensor, activation: Activation, out: Tensor | None = None, gate_first: bool = True, name: str = "input"
) -> Tensor:
    """act(g) · u with (g, u) the halves of x (..., 2F), or (u, g) if not gate_first; returns (..., F), out if given."""
    check_tensor(op, name, x)
    if out is None:
        return stacked_gate(x, activation, gate_first=gate_first, op=op, name=name)
    return stacked_gate_into(x, out, activation, gate_first=gate_first, op=op, name=name)


_MODULES: dict[type[nn.Module], Activation] = {
    nn.SiLU: "silu", nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Identity: "identity",
}  # fmt: skip


def activation_module(activation: Activation) -> nn.Module:
    """Return the activation as a child module, as the libraries' layers have it: users read or replace it."""
    if activation in ("gelu", "gelu_tanh"):
        return nn.GELU("none" if activation == "gelu" else "tanh")
    return next(kind for kind, name in _MODULES.items() if name == activation)()


def known_activation(module: Any) -> Activation | None:
    """Return the activation that a module of torch.nn computes, ignoring hooks; None for a subclass or anything else."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _MODULES.get(type(module))


def fused_activation(module: Any) -> Activation | None:
    """Return the activation a module computes; None if it must be called (hooks, subclass, unknown type, no module)."""
    activation = known_activation(module)
    return activation if activation is not None and is_untouched(module) else None


def rotate_pair(q: Tensor, k: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Call `rope` and return a pair: (q, None) if k is None."""
    if k is None:
        return rope(unit_stride(q), **arguments), None
    rotated: tuple[Tensor, Tensor] = rope(unit_stride(q), unit_stride(k, "k"), **arguments)
    return rotated


def rotate_as_given(
    query: Tensor, key: Tensor | None, q: Tensor, k: Tensor | None, call: dict[str, Any], impl: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """`rotate_pair` on q and k, the views of query and key with a head dimension; results have the original shapes."""
    q, k = rotate_pair(q, k, **call, impl=impl)
    return q.reshape(query.shape), None if key is None or k is None else k.reshape(key.shape)


def rotate_multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Any, layout: Any
) -> tuple[Tensor, Tensor | None]:
    """M-RoPE with tables (3, B, T, 2P) of the temporal, height and width angles of every token.

    The three tables are flattened into one: token t of sequence b has row (axis · B + b) · T + t. An extra small kernel
    computes these int32 row indices.
    """
    shape = shape_of("rope", "cos", cos)
    if len(shape) != 4 or shape[0] != 3:
        fail("rope", "cos", "have shape (3, B, T, 2P)", tuple(shape), "pass the tables of the three axes")
    cos, sin = alike("rope", *cut("rope", cos, sin, lambda x: x.flatten(0, 2)))
    try:
        sections = tuple(sections)
    except WRONG:
        contract = "be the numbers of pairs (t, h, w) of the three axes"
        fail("rope", "mrope_section", contract, shown(sections), "pass the model's mrope_section", TypeError)
    axes, batch, tokens = shape[:3]
    rows = torch.arange(axes * batch * tokens, dtype=torch.int32, device=cos.device).view(axes, batch, tokens)
    return rotate_pair(
        q, k, cos=cos, sin=sin, positions=rows, sections=sections, layout=layout,
        rotary_dim=shape[-1],
    )  # fmt: skip


def rotate_images(
    query: Tensor, key: Tensor | None, freqs_ci: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Rotate interleaved pairs of (B, T, H, D) as Llama 4's vision towers do.

    freqs_ci has T · D / 2 elements, shared by the batch. If it is real (cos θ), both elements of a pair are multiplied by it.
    """
    shape = shape_of("rope", "freqs_ci", freqs_ci, 1)
    try:
        table = freqs_ci.flatten(0, -2) if len(shape) > 1 else freqs_ci[None]
    except WRONG:
        explain("rope", "freqs_ci", freqs_ci)
        raise
    real = table.is_floating_point()
    tables = {"cos": table, "sin": torch.zeros_like(table)} if real else complex_tables(table)
    _check_pairs("freqs_ci", freqs_ci, query)
    return rotate_pair(query, key, **tables, layout="bshd", pairing="interleaved", impl=impl)
