"""One launch for q and k, and table rows that all heads of a token share.

Every head of a token needs the same row of cos and sin. A program that takes one head loads it for each; a program that
takes a group of heads loads it once a group. And since k needs the row that q needs, one launch can turn both: half of
the launches, which is what a decoding step of a few tokens mostly consists of.

The kernel counts for itself how many elements of the table it loads.
"""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def turn(x_ptr, y_ptr, cos, sin, token, heads, group, GROUP: tl.constexpr, P: tl.constexpr):
    """Heads [group · GROUP, (group + 1) · GROUP) of one token, those of them that exist."""
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
    """A program a token and group of heads, q and k at once: with grouped queries the later groups have no k left."""
    token, group = tl.program_id(0), tl.program_id(1)
    offs_p = (token % tokens) * P + tl.arange(0, P)
    cos, sin = tl.load(cos_ptr + offs_p)[None, :], tl.load(sin_ptr + offs_p)[None, :]
    tl.atomic_add(loaded_ptr, 2 * P)
    turn(q_ptr, q_out_ptr, cos, sin, token, q_heads, group, GROUP, P)
    if group * GROUP < k_heads:
        turn(k_ptr, k_out_ptr, cos, sin, token, k_heads, group, GROUP, P)


def rope_qk(q_BTHD, k_BTHD, cos_TP, sin_TP, group):
    """The rotated q and k, and the elements of the table that were loaded. One launch."""
    B, T, H, D = q_BTHD.shape
    out, loaded = (torch.empty_like(q_BTHD), torch.empty_like(k_BTHD)), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    grid = (B * T, triton.cdiv(H, group))
    rope_qk_kernel[grid](q_BTHD, k_BTHD, *out, cos_TP, sin_TP, loaded, T, H, k_BTHD.shape[2], group, D // 2)
    return out, loaded.item()


def reference(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)


torch.manual_seed(0)
B, T, Q_HEADS, K_HEADS, D = 1, 8, 8, 2, 64  # grouped queries: four heads of q share one of k
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
# A cache will catch many of those loads, but not their instructions. Larger groups have fewer programs, too, and a GPU
# with few programs is idle: how large a group should be is for a measurement to say.
