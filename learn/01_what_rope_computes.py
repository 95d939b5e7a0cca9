"""What rotary embedding computes, and how many bytes it must move.

A head of D features consists of D / 2 pairs. At position t, pair i is rotated by the angle t · f_i, f_i = base^(-2i / D):

    y_a = x_a cos - x_b sin        y_b = x_b cos + x_a sin        a = i, b = i + D / 2   ("half" pairing, NeoX style)

The point: the dot product of q rotated at position t and k rotated at position s depends only on t - s.
"""

import torch

B, T, H, D = 2, 64, 4, 32


def table(tokens, width, base=10000.0):
    """cos and sin (T, D / 2): one row per position, one column per pair."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BTHD, cos_TP, sin_TP):
    """The formula for all pairs."""
    a, b = x_BTHD.chunk(2, dim=-1)
    cos, sin = cos_TP[:, None, :], sin_TP[:, None, :]  # the same for every head
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


torch.manual_seed(0)
cos, sin = table(T, D)
q, k = torch.randn(2, B, T, H, D, dtype=torch.float64)

# 1. A pair is a complex number; the rotation is a multiplication by e^{i angle}.
a, b = q.chunk(2, dim=-1)
as_complex = torch.complex(a, b) * torch.complex(cos, sin)[:, None, :]
assert torch.allclose(rotate(q, cos, sin), torch.cat((as_complex.real, as_complex.imag), dim=-1))
print("a rotation of pairs is a product of complex numbers")

# 2. Rotation preserves the norm.
assert torch.allclose(rotate(q, cos, sin).norm(dim=-1), q.norm(dim=-1))
print("it preserves lengths")

# 3. The same q and k at every position: their dot product depends only on the distance.
same_q, same_k = q[:, :1].expand_as(q), k[:, :1].expand_as(k)
scores = torch.einsum("bthd,bshd->bhts", rotate(same_q, cos, sin), rotate(same_k, cos, sin))
for distance in (0, 1, 17):
    along = scores.diagonal(-distance, dim1=-2, dim2=-1)
    assert torch.allclose(along, along[..., :1].expand_as(along))
print("the product of a rotated q and a rotated k depends on their distance alone")

# 4. The minimum cost. Llama-3-8B, one sequence of 4096 tokens, bfloat16.
tokens, q_heads, k_heads, width, itemsize = 4096, 32, 8, 128, 2
elements = tokens * (q_heads + k_heads) * width
rows = 2 * tokens * (width // 2)  # cos and sin
must_move = (2 * elements + rows) * itemsize  # read and write every element once, read the table once
operations = 3 * elements  # per output: two multiplications and an addition
print(f"q and k of Llama-3-8B: {must_move / 2**20:.0f} MiB to move, {operations / 1e6:.0f} M operations")
print(
    f"that is {operations / must_move:.2f} operations a byte; in the time of one byte a GPU can do ten, with tensor cores over a hundred"
)
assert operations / must_move < 1
# So RoPE is memory-bound: its lower bound is the time of a copy of the same bytes.
