"""FLOP formulas, by leading terms, for operators that `torch.utils.flop_counter` leaves out.

A multiply-add is two FLOPs. Matrix products count their multiply-adds whatever the algorithm; factorisations count as
in LAPACK (LAPACK Working Note 41, appendix C), Fourier transforms as in FFTW (fftw.org/speed). Elementwise operators,
which include outer products, count nothing. Iterative algorithms (eigenvalues, singular values) have no count in
advance, and operators of other libraries none known here: `uncounted`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@functools.cache
def products() -> dict[Any, Callable[..., Any]]:
    """FLOP formulas of operators whose results are each one sum of products, by operator: PyTorch's, those of our own
    operators, and those missing from both. A function, because the import pulls in Triton."""
    from torch.utils import flop_counter

    from fusewise.ops.gated_linear.flops import register_flop_formulas

    register_flop_formulas()
    aten, known = torch.ops.aten, flop_counter.flop_registry
    for suffix in ("", "_backward"):
        attention = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}")
        known.setdefault(attention, known[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")])
    known.setdefault(
        torch.ops.higher_order.flex_attention,  # counted as dense, whatever the mask
        lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape),
    )
    known.setdefault(aten._int_mm, lambda x, y, **_: 2 * x.numel() * y.shape[-1])
    known.setdefault(aten.dot, lambda x, y, **_: 2 * x.numel())
    known.setdefault(aten.vdot, lambda x, y, **_: 2 * x.numel())
    known.setdefault(aten.mv, lambda a, x, **_: 2 * a.numel())
    known.setdefault(aten.addmv, lambda y, a, x, **_: 2 * a.numel())
    known.setdefault(aten.addbmm, lambda y, a, b, **_: 2 * a.numel() * b.shape[-1])
    known.setdefault(aten._trilinear, _trilinear)
    known.setdefault(aten.conv_tbc, lambda x, w, *_, out_val, **__: 2 * out_val.numel() * w.shape[:2].numel())
    # A distance sums over the features, whatever is done to each difference first: as many FLOPs as a product.
    known.setdefault(aten._euclidean_dist, lambda x, y, *_, out_val, **__: 2 * out_val.numel() * x.shape[-1])
    known.setdefault(aten._cdist_forward, lambda x, y, *_, out_val, **__: 2 * out_val.numel() * x.shape[-1])
    known.setdefault(aten._cdist_backward, lambda g, x, y, *_, **__: 2 * g.numel() * x.shape[-1])
    known.setdefault(aten._pdist_forward, lambda x, *_, out_val, **__: 2 * out_val.numel() * x.shape[-1])
    known.setdefault(aten._pdist_backward, lambda g, x, *_, **__: 2 * g.numel() * x.shape[-1])
    known.setdefault(aten._native_multi_head_attention, lambda q, k, v, *_, **__: _of_attention(q, k, v))
    known.setdefault(aten._transformer_encoder_layer_fwd, _of_encoder_layer)
    known.setdefault(aten.mkldnn_rnn_layer, lambda x, *weights, **_: _of_layers(x, weights[:2]))
    known.setdefault(aten.mkldnn_rnn_layer_backward, lambda x, *weights, **_: 2 * _of_layers(x, weights[:2]))
    known.setdefault(aten._cudnn_rnn, lambda x, weights, *_, **__: _of_layers(x, weights))
    known.setdefault(aten._cudnn_rnn_backward, lambda x, weights, *_, **__: 2 * _of_layers(x, weights))
    return known


def in_view(func: Any, args: Sequence[Any], kwargs: dict[str, Any], flops: int) -> int:
    """The FLOPs of an operator, given what its formula says: of `scaled_dot_product_attention` with `is_causal` only the
    share of the scores that are in view, i + 1 of query i."""
    if not str(func).startswith("aten._scaled_dot_product_"):
        return flops
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if not named.get("is_causal"):
        return flops
    rows: int = named["query"].shape[-2]
    columns: int = named["key"].shape[-2]
    square = min(rows, columns)
    return flops * (square * (square + 1) // 2 + (rows - square) * columns) // (rows * columns)


def _of_layers(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Recurrent layers in one operator: every weight is applied at every step of every sequence."""
    steps = x.shape[:-1].numel()
    return 2 * steps * sum(w.numel() for w in weights if w.ndim > 1)


def _of_attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Four projections of width E, the scores and the weighted sums: what nn.MultiheadAttention runs as one operator
    without gradients. Zero for nested tensors, whose sequence lengths are unknown here."""
    if q.is_nested:
        return 0
    return 2 * q.shape[-1] * (2 * q.numel() + k.numel() + v.numel()) + 4 * q.numel() * k.shape[-2]


def _of_encoder_layer(x: Tensor, *rest: Any, **_: Any) -> int:
    """Attention and the two products of the feed-forward network after it."""
    if x.is_nested:
        return 0
    weights: tuple[Tensor, Tensor] = (rest[13], rest[15])
    return _of_attention(x, x, x) + 2 * x.shape[:-1].numel() * sum(w.numel() for w in weights)


def _trilinear(x: Tensor, y: Tensor, z: Tensor, *rest: Any, **_: Any) -> int:
    """F.bilinear's three-factor product. The sums over one index come first, so it costs one two-factor product over
    the full index space."""
    shapes: list[list[int]] = []
    for factor, ones in zip((x, y, z), rest[:3], strict=True):
        shape = list(factor.shape)
        for dim in sorted(ones):
            shape.insert(dim, 1)
        shapes.append(shape)
    indices: torch.Size = torch.broadcast_shapes(*shapes)
    return 2 * math.prod(indices)


def _lu(a: Tensor) -> int:
    """getrf of m × n, m ≥ n: m n² - n³/3, so 2/3 n³ if square; the transpose if wider than high."""
    *batch, m, n = a.shape
    short, long = min(m, n), max(m, n)
    return math.prod(batch) * (3 * long * short**2 - short**3) // 3


def _qr(a: Tensor, q: Tensor | None) -> int:
    """geqrf of m × n, m ≥ n: 2 m n² - 2/3 n³;
    orgqr of c columns of Q from k = min(m, n): 4 m c k - 2 (m + c) k² + 4/3 k³."""
    *batch, m, n = a.shape
    k, c = min(m, n), 0 if q is None else q.shape[-1]
    of_q = 4 * m * c * k - 2 * (m + c) * k**2 + 4 * k**3 // 3 if c else 0
    return 2 * _lu(a) + math.prod(batch) * of_q


def _solved(a: Tensor, x: Tensor) -> int:
    """getrs: two triangular solves, 2 n² per right-hand side; the result has n k elements."""
    return 2 * a.shape[-1] * x.numel()


#: Factorisations and solves with them: the position of the matrix among the arguments, and the FLOPs from it and the
#: results. Their longest sum has as many terms as the longer side of the matrix.
FACTORISATIONS: dict[str, tuple[int, Callable[[Tensor, Sequence[Tensor]], int]]] = {
    "linalg_lu_factor_ex": (0, lambda a, _: _lu(a)),
    "linalg_lu": (0, lambda a, _: _lu(a)),
    "_linalg_det": (0, lambda a, _: _lu(a)),
    "_linalg_slogdet": (0, lambda a, _: _lu(a)),
    "_linalg_solve_ex": (0, lambda a, outputs: _lu(a) + _solved(a, outputs[0])),
    "linalg_lu_solve": (0, lambda a, outputs: _solved(a, outputs[0])),
    "linalg_solve_triangular": (0, lambda a, outputs: _solved(a, outputs[0]) // 2),  # trtrs: n² per right-hand side
    "triangular_solve": (1, lambda a, outputs: _solved(a, outputs[0]) // 2),
    "linalg_inv_ex": (0, lambda a, _: 2 * a.numel() * a.shape[-1]),  # getrf and getri: 2 n³
    "linalg_cholesky_ex": (0, lambda a, _: a.numel() * a.shape[-1] // 3),  # potrf: n³/3
    "cholesky": (0, lambda a, _: a.numel() * a.shape[-1] // 3),
    "cholesky_solve": (1, lambda a, outputs: _solved(a, outputs[0])),  # potrs: 2 n² per right-hand side
    "cholesky_inverse": (0, lambda a, _: 2 * a.numel() * a.shape[-1] // 3),  # potri: 2/3 n³
    "linalg_qr": (0, lambda a, outputs: _qr(a, outputs[0] if len(outputs) > 1 else None)),
}
#: Fourier transforms: FLOPs per element and per doubling of the length. Half as many if one side is real.
TRANSFORMS = {"_fft_c2c": 5.0, "_fft_r2c": 2.5, "_fft_c2r": 2.5}


def of_transform(name: str, given: Tensor, output: Tensor, dims: Sequence[int]) -> int:
    """5 N log₂ n for N complex elements in transforms of length n."""
    x = output if name == "_fft_c2r" else given  # the side with all elements
    return int(TRANSFORMS[name] * x.numel() * math.log2(math.prod(x.shape[dim] for dim in dims)))


#: ATen's operators with considerable arithmetic and no count: iterative ones, those whose work depends on the values,
#: and factorisations that are rarely used.
UNCOUNTED = {
    "_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "linalg_lstsq", "linalg_pinv",
    "linalg_matrix_exp", "linalg_ldl_factor_ex", "linalg_ldl_solve", "geqrf", "ormqr", "linalg_householder_product",
    "_ctc_loss", "_cudnn_ctc_loss", "_sparse_addmm", "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", "_cslt_sparse_mm",
    "_grouped_mm", "_scaled_grouped_mm", "_weight_int4pack_mm", "_weight_int8pack_mm", "_dyn_quant_matmul_4bit",
}  # fmt: skip
#: Namespaces of operators that are elementwise or have a formula, unless they are UNCOUNTED.
KNOWN = {"aten", "prim", "prims", "fusewise", "inductor", "profiler", "_c10d_functional", "c10d_functional", "c10d"}


def uncounted(func: Any, formula: bool, given: Sequence[Tensor]) -> bool:
    """Whether an operator's FLOPs are unknown: that of another library, one that takes functions, products of sparse
    and nested tensors, and UNCOUNTED."""
    if not isinstance(func, torch._ops.OpOverload):
        return not formula
    name = func.overloadpacket.__name__
    odd = any(x.layout != torch.strided or x.is_nested for x in given)
    if formula or name in FACTORISATIONS or name in TRANSFORMS:
        return odd
    return name in UNCOUNTED or func.namespace not in KNOWN
