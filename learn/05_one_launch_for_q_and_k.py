"""One launch for q and k, and table rows shared by all heads of a token.

Every head of a token needs the same cos/sin row. With one program per head the row is loaded once per head; with one
program per group of heads, once per group. k needs the same row as q, so one launch can rotate both. That halves the
launches, which dominate a decode step of a few tokens.

The kernel counts the table elements it loads.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def turn(x_ptr, y_ptr, cos, sin, token, heads, group, GROUP: tl.constexpr, P: tl.constexpr):
    """Rotate heads [group · GROUP, (group + 1) · GROUP) of one token, masked to the existing heads."""
    offs_h = group * GROUP + tl.arange(0, GROUP)[:, None]
    offs = (token * heads + offs_h) * 2 * P + tl.arange(0, P)[None, :]
    mask = offs_h < heads
    a = tl.load(x_ptr + offs, mask=mask)
    b = tl.load(x_ptr + offs + P, mask=mask)
    tl.store(y_ptr + offs, a * cos - b * sin, mask=mask)
    tl.store(y_ptr + offs + P, b * cos + a * sin, mask=mask)


@triton.jit
def rope_qk_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, loaded_ptr, tokens, q_heads, k_heads,
    GROUP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One program per token and group of heads, for q and k. With grouped-query attention later groups have no k heads."""
    token, group = tl.program_id(0), tl.program_id(1)
    offs_p = (token % tokens) * P + tl.arange(0, P)
    cos, sin = tl.load(cos_ptr + offs_p)[None, :], tl.load(sin_ptr + offs_p)[None, :]
    tl.atomic_add(loaded_ptr, 2 * P)
    turn(q_ptr, q_out_ptr, cos, sin, token, q_heads, group, GROUP, P)
    if group * GROUP < k_heads:
        turn(k_ptr, k_out_ptr, cos, sin, token, k_heads, group, GROUP, P)


def rope_qk(q_BTHD, k_BTHD, cos_TP, sin_TP, group):
    """Return the rotated q and k, and the number of table elements loaded. One launch."""
    B, T, H, D = q_BTHD.shape
    out, loaded = (torch.empty_like(q_BTHD), torch.empty_like(k_BTHD)), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    grid = (B * T, triton.cdiv(H, group))
    rope_qk_kernel[grid](q_BTHD, k_BTHD, *out, cos_TP, sin_TP, loaded, T, H, k_BTHD.shape[2], group, D // 2)
    return out, loaded.item()


def reference(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)


torch.manual_seed(0)
B, T, Q_HEADS, K_HEADS, D = 1, 8, 8, 2, 64  # grouped-query attention: four q heads per k head
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
q, k = torch.randn(B, T, Q_HEADS, D, device=DEVICE), torch.randn(B, T, K_HEADS, D, device=DEVICE)
data = 2 * (q.numel() + k.numel())  # read and written

for group in (1, 4, 8):
    (q_rotated, k_rotated), loaded = rope_qk(q, k, cos, sin, group)
    assert torch.allclose(q_rotated, reference(q, cos, sin), atol=1e-6)
    assert torch.allclose(k_rotated, reference(k, cos, sin), atol=1e-6)
    share = loaded / (loaded + data)
    print(
        f"{group} heads a program: {B * T * Q_HEADS // group:3} programs, {loaded} table elements loaded: {share:.0%} of all"
    )
    assert loaded == B * T * (Q_HEADS // group) * D
# Many of those loads hit a cache, but their instructions still execute. Larger groups mean fewer programs, and too few
# leave a GPU idle, so the best group size has to be measured.
