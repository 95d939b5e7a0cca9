"""Strides instead of copies: one kernel for every layout.

Models store q as (B, T, H, D), as (B, H, T, D), as (T, B, H, D), or as a slice of one packed qkv tensor: the same elements
with different strides. A kernel that takes strides reads them in place. One that assumes a contiguous tensor needs
`.contiguous()` first, which moves as many bytes as the rotation itself.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, heads,
    stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    BLOCK_H: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One program per token; only the features of a head must be contiguous."""
    b, t = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    offs_h, offs_p = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, P)[None, :]
    mask = (offs_h < heads) & (offs_p < P)  # 3 heads use a block of 4 with one masked
    cos = tl.load(cos_ptr + t * P + offs_p)
    sin = tl.load(sin_ptr + t * P + offs_p)
    x_ptrs = x_ptr + b * stride_x_b + t * stride_x_t + offs_h * stride_x_h + offs_p
    y_ptrs = y_ptr + b * stride_y_b + t * stride_y_t + offs_h * stride_y_h + offs_p
    x_a = tl.load(x_ptrs, mask=mask).to(tl.float32)
    x_b = tl.load(x_ptrs + P, mask=mask).to(tl.float32)
    tl.store(y_ptrs, x_a * cos - x_b * sin, mask=mask)
    tl.store(y_ptrs + P, x_b * cos + x_a * sin, mask=mask)


def rope(x_BTHD, cos_TP, sin_TP, out=None):
    """Rotate x with any strides and contiguous features; the result has the stride order of x, or is written to out."""
    B, T, H, D = x_BTHD.shape
    y = torch.empty_like(x_BTHD) if out is None else out
    block = triton.next_power_of_2(H)
    rope_kernel[(B * T,)](x_BTHD, y, cos_TP, sin_TP, T, H, *x_BTHD.stride()[:3], *y.stride()[:3], block, D // 2)
    return y


torch.manual_seed(0)
B, T, H, D = 2, 8, 3, 32
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
values = torch.randn(B, T, H, D, device=DEVICE)
packed = torch.randn(B, T, H, 3, D, device=DEVICE)  # q, k and v of a head adjacent, from one projection
packed[:, :, :, 0] = values

layouts = {
    "(B, T, H, D)": values,
    "(B, H, T, D)": values.transpose(1, 2).contiguous().transpose(1, 2),
    "(T, B, H, D)": values.transpose(0, 1).contiguous().transpose(0, 1),
    "packed qkv": packed[:, :, :, 0],
}
expected = rope(values, cos, sin)
a, b, c, s = (x.double() for x in (*values.chunk(2, dim=-1), cos[:, None], sin[:, None]))
right = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
# Within one rounding of float64, as in rung 3. Not compared with eager code, which rounds products that a GPU's FMA does not.
assert (expected - right).abs().max() <= torch.finfo(torch.float32).eps * right.abs().max()

for name, x in layouts.items():
    y = rope(x, cos, sin)
    spared = 0 if x.is_contiguous() else 2 * x.numel() * x.element_size()
    print(f"{name:13} strides {x.stride()!s:19} bytes that a copy before the kernel would move: {spared}")
    assert torch.equal(y, expected)  # bitwise equal
    assert sorted(range(3), key=y.stride) == sorted(range(3), key=x.stride)  # the layout is preserved

# To prove that nothing is copied, rotate q in place inside the packed tensor. k and v do not change.
before = packed.clone()
rope(packed[:, :, :, 0], cos, sin, out=packed[:, :, :, 0])
assert torch.equal(packed[:, :, :, 0], expected)
assert torch.equal(packed[:, :, :, 1:], before[:, :, :, 1:])
print("in place inside the packed tensor: q is rotated, k and v are untouched")
