"""The backward is the same kernel with -sin, and does not need x.

A rotation is a linear map, y = R x, so the gradient dx = R^T dy does not depend on x. R is orthogonal: R^T rotates by the
negative angle, so cos stays and sin changes sign. One kernel does both directions.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def rope_kernel(x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, INVERSE: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    token = tl.program_id(0)
    offs_p = tl.arange(0, P)
    cos = tl.load(cos_ptr + (token % tokens) * P + offs_p)[None, :]
    sin = tl.load(sin_ptr + (token % tokens) * P + offs_p)[None, :]
    if INVERSE:
        sin = -sin  # the only change for backward
    offs = (token * H + tl.arange(0, H)[:, None]) * 2 * P + offs_p[None, :]
    a, b = tl.load(x_ptr + offs), tl.load(x_ptr + offs + P)
    tl.store(y_ptr + offs, a * cos - b * sin)
    tl.store(y_ptr + offs + P, b * cos + a * sin)


def launch(x_BTHD, cos_TP, sin_TP, inverse):
    B, T, H, D = x_BTHD.shape
    x_BTHD, y = x_BTHD.contiguous(), torch.empty(B, T, H, D, device=x_BTHD.device)
    rope_kernel[(B * T,)](x_BTHD, y, cos_TP, sin_TP, T, inverse, H, D // 2)
    return y


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse):
        ctx.save_for_backward(cos, sin)  # not x
        ctx.inverse = inverse
        return launch(x, cos, sin, inverse)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return Rope.apply(dy, cos, sin, not ctx.inverse), None, None, None  # differentiable any number of times


def eager(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)


torch.manual_seed(0)
B, T, H, D = 2, 8, 4, 32
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
x, dy = torch.randn(2, B, T, H, D, device=DEVICE)
x.requires_grad_()

# 1. Rotate and rotate back.
back = launch(launch(x.detach(), cos, sin, False), cos, sin, True)
print(f"rotated and rotated back: largest difference {(back - x).abs().max():.1e}")
assert torch.allclose(back, x, atol=1e-6)

# 2. Compare with the gradient of eager code.
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
    y = Rope.apply(x, cos, sin, False)
(ours,) = torch.autograd.grad(y, x, dy)
(theirs,) = torch.autograd.grad(eager(x, cos, sin), x, dy)
print(f"gradient against autograd's: largest difference {(ours - theirs).abs().max():.1e}")
assert torch.allclose(ours, theirs, atol=1e-6)

# 3. Saved for backward: only the two tables, which the model keeps anyway.
print(f"kept for backward: {[tuple(t.shape) for t in kept]}; x has shape {tuple(x.shape)}")
assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}

# 4. Double backward uses the same kernel.
v = dy.clone().requires_grad_()
(dx,) = torch.autograd.grad(Rope.apply(x, cos, sin, False), x, v, create_graph=True)
(dv,) = torch.autograd.grad(dx, v, x.detach())
assert torch.allclose(dv, launch(x.detach(), cos, sin, False), atol=1e-6)
print("the gradient of the gradient is the forward again")
