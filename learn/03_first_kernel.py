"""The first Triton kernel: one program per token.

A Triton program is one block of work, written as operations on arrays. Here a program handles one token: it loads the
token's table row once and all heads as a block of (heads, pairs), rotates them and stores them. Intermediate values stay
in registers, so each element of x is read once and written once.

Without a GPU, Triton's interpreter runs the same code on numpy.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # read when Triton is imported

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def rope_kernel(x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, H: tl.constexpr, P: tl.constexpr):
    """x, y (B, T, H, 2P) contiguous, cos, sin (T, P). H and P must be powers of two, as block sizes are."""
    token = tl.program_id(0)  # one of B · T
    offs_p = tl.arange(0, P)
    cos = tl.load(cos_ptr + (token % tokens) * P + offs_p)[None, :]  # [1, P]
    sin = tl.load(sin_ptr + (token % tokens) * P + offs_p)[None, :]

    offs_h = tl.arange(0, H)
    offs_a = (token * H + offs_h[:, None]) * 2 * P + offs_p[None, :]  # [H, P], the first half of each head
    offs_b = offs_a + P
    a = tl.load(x_ptr + offs_a).to(tl.float32)
    b = tl.load(x_ptr + offs_b).to(tl.float32)
    tl.store(y_ptr + offs_a, a * cos - b * sin)  # rounded once, to the dtype of y
    tl.store(y_ptr + offs_b, b * cos + a * sin)


def rope(x_BTHD, cos_TP, sin_TP):
    B, T, H, D = x_BTHD.shape
    y = torch.full_like(x_BTHD, float("nan"))  # elements that the kernel does not write stay NaN
    rope_kernel[(B * T,)](x_BTHD, y, cos_TP, sin_TP, T, H, D // 2)
    return y


def reference(x, cos, sin):
    """The formula in float64, from the same rounded inputs."""
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


torch.manual_seed(0)
B, T, H, D = 2, 8, 4, 32
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
print(f"{B * T} programs, each with a block of {H} heads x {D // 2} pairs, on {DEVICE}")

for dtype in (torch.float32, torch.float16):
    x = torch.randn(B, T, H, D, device=DEVICE).to(dtype)
    right = reference(x, cos, sin)
    ours = rope(x, cos, sin).double() - right
    a, b = x.chunk(2, dim=-1)  # eager code rounds after every operation
    c, s = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    eager = torch.cat((a * c - b * s, b * c + a * s), dim=-1).double() - right

    print(f"{dtype}: typical error {ours.square().mean().sqrt():.1e}, of eager code {eager.square().mean().sqrt():.1e}")
    assert ours.abs().max() <= torch.finfo(dtype).eps * right.abs().max()  # one rounding; a NaN also fails
    assert ours.square().mean() <= 1.01 * eager.square().mean()
