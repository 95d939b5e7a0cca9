"""The floating point operations of operators that PyTorch's own formulas (`torch.utils.flop_counter`) leave out, by leading terms.

A multiplication and an addition are two. Products take what their terms take, in whatever order they are made; factorisations what
LAPACK's take (LAPACK Working Note 41, appendix C); Fourier transforms what FFTW counts them as (fftw.org/speed). Of what is found by
iteration, eigenvalues and singular values, nothing is known beforehand and nothing counted, nor of elementwise operations, of which
an outer product is one.
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
    """The operations of operators of which each result is one sum of products, by operator, given its arguments: PyTorch's formulas,
    those of our own operations, and what these leave out. Brings Triton with it, and so waits for the first that counts."""
    from torch.utils import flop_counter

    from fusewise.ops.gated_linear.flops import register_flop_formulas

    register_flop_formulas()
    aten, known = torch.ops.aten, flop_counter.flop_registry
    for suffix in ("", "_backward"):
        attention = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}")
        known.setdefault(attention, known[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")])
    known.setdefault(
        torch.ops.higher_order.flex_attention,  # dense: a mask says nothing here
        lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape),
    )
    known.setdefault(aten.dot, lambda x, y, **_: 2 * x.numel())
    known.setdefault(aten.vdot, lambda x, y, **_: 2 * x.numel())
    known.setdefault(aten.mv, lambda a, x, **_: 2 * a.numel())
    known.setdefault(aten.addmv, lambda y, a, x, **_: 2 * a.numel())
    known.setdefault(aten.addbmm, lambda y, a, b, **_: 2 * a.numel() * b.shape[-1])
    known.setdefault(aten._trilinear, _trilinear)
    known.setdefault(aten.conv_tbc, lambda x, w, *_, out_val, **__: 2 * out_val.numel() * w.shape[:2].numel())
    # A distance is a sum over the features, whatever is done to a difference before: as many operations as by a product.
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


def _of_layers(x: Tensor, weights: Sequence[Tensor]) -> int:
    """The operations of recurrent layers that are one operator: every weight meets every step of every sequence."""
    steps = x.shape[:-1].numel()
    return 2 * steps * sum(w.numel() for w in weights if w.ndim > 1)


def _of_attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Four projections of width E, scores and their sums: what nn.MultiheadAttention runs as one operator without gradients. Of
    sequences that differ in length nothing is known."""
    if q.is_nested:
        return 0
    return 2 * q.shape[-1] * (2 * q.numel() + k.numel() + v.numel()) + 4 * q.numel() * k.shape[-2]


def _of_encoder_layer(x: Tensor, *rest: Any, **_: Any) -> int:
    """Attention and the two products of the network behind it."""
    if x.is_nested:
        return 0
    weights: tuple[Tensor, Tensor] = (rest[13], rest[15])
    return _of_attention(x, x, x) + 2 * x.shape[:-1].numel() * sum(w.numel() for w in weights)


def _trilinear(x: Tensor, y: Tensor, z: Tensor, *rest: Any, **_: Any) -> int:
    """F.bilinear's product of three: the sums over one index first, as a product of two for each of all the indices."""
    shapes: list[list[int]] = []
    for factor, ones in zip((x, y, z), rest[:3], strict=True):
        shape = list(factor.shape)
        for dim in sorted(ones):
            shape.insert(dim, 1)
        shapes.append(shape)
    indices: torch.Size = torch.broadcast_shapes(*shapes)
    return 2 * math.prod(indices)


def _lu(a: Tensor) -> int:
    """getrf of m × n, m ≥ n: m n² - n³/3, so 2/3 n³ of a square; the same of what is wider than high."""
    *batch, m, n = a.shape
    short, long = min(m, n), max(m, n)
    return math.prod(batch) * (3 * long * short**2 - short**3) // 3


def _qr(a: Tensor, q: Tensor | None) -> int:
    """geqrf of m × n, m ≥ n: 2 m n² - 2/3 n³; orgqr of c columns of Q from k = min(m, n): 4 m c k - 2 (m + c) k² + 4/3 k³."""
    *batch, m, n = a.shape
    k, c = min(m, n), 0 if q is None else q.shape[-1]
    made = 4 * m * c * k - 2 * (m + c) * k**2 + 4 * k**3 // 3 if c else 0
    return 2 * _lu(a) + math.prod(batch) * made


def _solved(a: Tensor, x: Tensor) -> int:
    """getrs: two triangular systems, 2 n² for each right side; what comes out has n k numbers."""
    return 2 * a.shape[-1] * x.numel()


#: Of factorisations, and of solving with them: which argument is the matrix, and the operations of it and of what comes out. A sum
#: in one has as many terms as the matrix is long.
FACTORISATIONS: dict[str, tuple[int, Callable[[Tensor, Sequence[Tensor]], int]]] = {
    "linalg_lu_factor_ex": (0, lambda a, _: _lu(a)),
    "linalg_lu": (0, lambda a, _: _lu(a)),
    "_linalg_det": (0, lambda a, _: _lu(a)),
    "_linalg_slogdet": (0, lambda a, _: _lu(a)),
    "_linalg_solve_ex": (0, lambda a, made: _lu(a) + _solved(a, made[0])),
    "linalg_lu_solve": (0, lambda a, made: _solved(a, made[0])),
    "linalg_solve_triangular": (0, lambda a, made: _solved(a, made[0]) // 2),  # trtrs: n² for each right side
    "triangular_solve": (1, lambda a, made: _solved(a, made[0]) // 2),
    "linalg_inv_ex": (0, lambda a, _: 2 * a.numel() * a.shape[-1]),  # getrf and getri: 2 n³
    "linalg_cholesky_ex": (0, lambda a, _: a.numel() * a.shape[-1] // 3),  # potrf: n³/3
    "cholesky": (0, lambda a, _: a.numel() * a.shape[-1] // 3),
    "cholesky_solve": (1, lambda a, made: _solved(a, made[0])),  # potrs: 2 n² for each right side
    "cholesky_inverse": (0, lambda a, _: 2 * a.numel() * a.shape[-1] // 3),  # potri: 2/3 n³
    "linalg_qr": (0, lambda a, made: _qr(a, made[0] if len(made) > 1 else None)),
}
#: Fourier transforms, and the operations of each number for each doubling of the length: half as many where one side is real.
TRANSFORMS = {"_fft_c2c": 5.0, "_fft_r2c": 2.5, "_fft_c2r": 2.5}


def of_transform(name: str, given: Tensor, made: Tensor, dims: Sequence[int]) -> int:
    """5 N log₂ n of N complex numbers in transforms of length n."""
    x = made if name == "_fft_c2r" else given  # the side that has all numbers
    return int(TRANSFORMS[name] * x.numel() * math.log2(math.prod(x.shape[dim] for dim in dims)))
