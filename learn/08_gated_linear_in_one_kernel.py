"""A linear layer and its gate in one kernel, and the memory it saves.

    h = x W^T + b            (N, 8d)      x (N, d), W (8d, d)
    y = h1 · gelu(h2)        (N, 4d)      the two halves of h

Eager code writes h to memory, reads half of it, writes gelu(h2), reads both and writes y. A kernel that computes the two
columns of h for each column of y keeps both in registers and never materializes h. The activations are then 5 N d elements
(x and y), where x and h are 9 N d, and the peak of eager code is higher than both. Measured below.
"""

import os
import weakref

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def geglu_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, N, F,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of y: two accumulators, for value and gate, over the same rows of x."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_n, mask_f = offs_n < N, offs_f < F
    value = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    gate = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + offs_n[:, None] * D + offs_d[None, :], mask=mask_n[:, None])
        w_ptrs = w_ptr + offs_f[None, :] * D + offs_d[:, None]
        value = tl.dot(x, tl.load(w_ptrs, mask=mask_f[None, :]), value, input_precision="ieee")
        gate = tl.dot(x, tl.load(w_ptrs + F * D, mask=mask_f[None, :]), gate, input_precision="ieee")
    value += tl.load(b_ptr + offs_f, mask=mask_f)[None, :]
    gate += tl.load(b_ptr + F + offs_f, mask=mask_f)[None, :]
    inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate)
    tanh = 1 - 2 / (tl.exp(2 * inner) + 1)
    y = value * 0.5 * gate * (1 + tanh)
    tl.store(y_ptr + offs_n[:, None] * F + offs_f[None, :], y, mask=mask_n[:, None] & mask_f[None, :])


def fused(x, weight, bias):
    N, D = x.shape
    F = weight.shape[0] // 2
    y = torch.empty(N, F, device=x.device)
    grid = triton.cdiv(N, 32), triton.cdiv(F, 64)
    with _disable_current_modes():  # a launch allocates nothing; do not count the interpreter's own tensors
        geglu_kernel[grid](x, weight, bias, y, N, F, D, 32, 64, 32)
    return y


def eager(x, weight, bias):
    value, gate = functional.linear(x, weight, bias).chunk(2, dim=-1)
    return value * functional.gelu(gate, approximate="tanh")


class Held(TorchDispatchMode):
    """Track the peak number of live elements, parameters excluded: counted on creation, removed when freed."""

    def __init__(self, x, parameters):
        super().__init__()
        self.now = self.most = x.numel()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in (x, *parameters)}  # includes their views

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            elements = storage.nbytes() // result.element_size()
            self.now += elements
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, storage.data_ptr(), elements)
        return result

    def forget(self, pointer, elements):
        self.known.discard(pointer)
        self.now -= elements


torch.manual_seed(0)
N, d = 256, 64
x = torch.randn(N, d, device=DEVICE)
weight, bias = torch.randn(8 * d, d, device=DEVICE) / d**0.5, torch.randn(8 * d, device=DEVICE)

y, expected = fused(x, weight, bias), eager(x.double(), weight.double(), bias.double())
error, band = (y - expected).abs().max().item(), (eager(x, weight, bias) - expected).abs().max().item()
print(f"largest error {error:.1e}, of eager code {band:.1e}")
assert error <= 2 * band + torch.finfo(torch.float32).eps * expected.abs().max().item()

print(f"most activations at once, N = {N}, d = {d}, in N d elements:")
held = {}
for name, function in (("eager", eager), ("fused", fused)):
    with Held(x, (weight, bias)) as counter:
        function(x, weight, bias)
    held[name] = counter.most / (N * d)
    print(f"    {name}: {held[name]:g}")
assert held["fused"] == 5  # x and y
assert held["eager"] == 17  # x, h (8), gelu(h2) (4) and y (4)
print("a backward keeps h, or keeps x alone and computes h again: fusewise.geglu_linear(..., save=...) has both")
