"""How many bytes eager PyTorch moves for a rotation.

Eager mode runs one kernel per operation, and each kernel reads its inputs from memory and writes its result back. A
TorchDispatchMode sees every operation; summing the bytes of its tensors gives the memory traffic, with or without a GPU.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

B, T, H, D = 1, 256, 16, 64
VIEWS = {"view", "slice", "unsqueeze", "split", "alias", "expand", "transpose", "detach", "_unsafe_view"}


def size(x):
    """Bytes of a tensor in memory; an expanded dimension is stored once."""
    stored = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        stored *= length if stride else 1
    return stored * x.element_size()


class Traffic(TorchDispatchMode):
    """Record bytes read and written per operation. Views move nothing."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            flat = [y for x in args for y in (x if isinstance(x, (list, tuple)) else (x,))]
            read = sum(size(x) for x in flat if isinstance(x, torch.Tensor))
            self.rows.append((name, read, size(result)))
        return result

    def total(self):
        return sum(read + written for _, read, written in self.rows)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def eager(x_BTHD, cos_TD, sin_TD):
    """The code of most model files; tables hold every angle twice, `cat(f, f)`."""
    cos, sin = cos_TD[:, None, :], sin_TD[:, None, :]
    return x_BTHD * cos + rotate_half(x_BTHD) * sin


torch.manual_seed(0)
x = torch.randn(B, T, H, D)
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D)).repeat(1, 2)
cos, sin = angles.cos(), angles.sin()

with Traffic() as traffic:
    eager(x, cos, sin)

print(f"{'operation':10} {'reads KiB':>10} {'writes KiB':>10}")
for name, read, written in traffic.rows:
    print(f"{name:10} {read / 1024:10.0f} {written / 1024:10.0f}")

must_move = 2 * size(x) + size(cos)  # half of each duplicated table suffices
print(
    f"moved {traffic.total() / 1024:.0f} KiB, must move {must_move / 1024:.0f}: {traffic.total() / must_move:.1f} times"
)

# By hand, in units of x: mul 2, neg of one half 1, cat 2, mul 2, add 3. The minimum is 2.
tables = size(cos) + size(sin)
assert traffic.total() - tables == 10 * size(x)
assert 4.5 < traffic.total() / must_move < 5.5
# On a GPU, where memory bandwidth is the limit, this is also the slowdown. The next rung uses one kernel.
