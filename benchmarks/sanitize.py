"""Call every fusewise kernel, with small and large inputs, under NVIDIA's compute-sanitizer:

    compute-sanitizer --tool racecheck python benchmarks/sanitize.py rope triton
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py gated_linear gluon

Tools: memcheck, racecheck, synccheck and initcheck. Operations: rope, rope_and_cache, qk_norm_rope and gated_linear, with each
implementation. The first three run the cases of the tests' matrices, which cover every feature separately, and larger
ragged cases; results are not compared. PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor its own allocation, so that
memcheck detects out-of-bounds accesses. A third argument selects a device other than cuda.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import fusewise
from fusewise.ops.gated_linear._problem import ACTIVATIONS

# tests/ is not a package, and other distributions install a package named tests.
package = sys.modules["fusewise_tests"] = types.ModuleType("fusewise_tests")
package.__path__ = [str(Path(__file__).resolve().parent.parent / "tests")]

Calls = Iterator[tuple[str, Callable[[], Any]]]
ROWS = (1, 3, 16, 64, 65, 130, 300)


def rope(impl: str, device: str) -> Calls:
    from fusewise_tests.ops.rope import test_cuda_bulk, test_cuda_light, test_matrix
    from fusewise_tests.ops.rope.support import Case, copy_of, make

    # The CUDA implementation has separate kernels for large calls.
    large = (
        [*map(test_cuda_light.grown, test_cuda_light.CASES), *(case for case, _ in test_cuda_bulk.LARGE)]
        if impl == "cuda"
        else []
    )
    wide = {"heads": 7, "kv_heads": 3, "dtype": "bf16"}
    ragged = [
        Case(name="ragged-large", batch=2, tokens=63, head_dim=128, **wide),
        Case(name="ragged-large-interleaved", batch=3, tokens=61, head_dim=64, pairing="interleaved", **wide),
        Case(name="ragged-large-partial", batch=2, tokens=59, head_dim=80, rotary_dim=32, table="fused", **wide),
        Case(name="ragged-large-frequencies", layout="thd", tokens=333, head_dim=128, table="inv_freq", **wide),
        Case(name="ragged-large-packed-memory", layout="thd", tokens=64, head_dim=96, memory="packed", **wide),
        Case(name="ragged-large-shared-key", tokens=63, heads=16, kv_heads=1, head_dim=192, k_head_dim=64, rotary_dim=64,
             options={"rotary_start": -64}, pairing="interleaved_to_half", dtype="bf16"),
    ]  # fmt: skip

    def forward(case: Any) -> None:
        call = make(case, device)
        fusewise.rope(*call.xs, **call.kwargs, impl=impl)

    def in_place(case: Any) -> None:
        call = make(case, device)
        xs, _ = copy_of(call.xs)
        fusewise.rope_(*xs, **call.kwargs, impl=impl)

    def backward(case: Any) -> None:
        call = make(case, device)
        xs = [x.detach().requires_grad_() for x in call.xs]
        ys = fusewise.rope(*xs, **call.kwargs, impl=impl)
        ys = ys if isinstance(ys, tuple) else (ys,)
        torch.autograd.grad(ys, xs, [torch.randn(y.shape).to(y) for y in ys])

    def into(case: Any) -> None:
        call = make(case, device)
        outs = tuple(torch.empty_like(x) for x in make(case, device).xs)
        fusewise.rope(*call.xs, **call.kwargs, impl=impl, out=outs if len(outs) == 2 else outs[0])

    for case in (*test_matrix.CASES, *ragged, *large):
        yield f"{case.name} forward", lambda case=case: forward(case)
        if case.memory != "expanded":
            yield f"{case.name} in place", lambda case=case: in_place(case)
    for case in (*test_matrix.BACKWARD, *ragged):
        yield f"{case.name} backward", lambda case=case: backward(case)
    for case in test_matrix.INTO:
        yield f"{case.name} into", lambda case=case: into(case)


def rope_and_cache(impl: str, device: str) -> Calls:
    from fusewise_tests.ops.rope_and_cache.cases import CASES, make

    def call(case: Any) -> None:
        made = make(case, device)
        fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments(), impl=impl)

    for name, case in CASES.items():
        if case.dtype != "fp64":
            yield name, lambda case=case: call(case)


def qk_norm_rope(impl: str, device: str) -> Calls:
    from fusewise_tests.ops.qk_norm_rope.support import NormCase, build
    from fusewise_tests.ops.qk_norm_rope.test_cuda_on_cpu import CASES  # of the matrix, and more
    from fusewise_tests.ops.rope.support import Case

    wide = {"batch": 2, "heads": 7, "kv_heads": 3, "dtype": "bf16"}
    ragged = [
        NormCase(Case(name="ragged-large", tokens=63, head_dim=128, **wide), weight_dtype=torch.bfloat16),
        NormCase(Case(name="ragged-large-all", tokens=61, head_dim=64, **wide), "all"),
        NormCase(Case(name="ragged-large-partial", tokens=59, head_dim=80, rotary_dim=32, **wide), weight_offset=1.0),
    ]

    def both(case: Any) -> None:
        build(case, device).run(impl)

    def forward(case: Any) -> None:
        made = build(case, device)
        made.call(made.xs, made.weights, impl=impl)

    for case in (*CASES, *ragged):
        yield f"{case.name} forward and backward", lambda case=case: both(case)
        if case.norm == "all" or "large" in case.name:
            yield f"{case.name} forward", lambda case=case: forward(case)


def gated_linear(impl: str, device: str) -> Calls:
    """Vary rows, widths off the tile sizes, biases, `save`, layouts and activations, without their full product."""
    widths = [(72, 136), (200, 328), (136, 40)]  # D, F: rows are multiples of 16 bytes, as TMA requires
    kinds = [(torch.bfloat16, "silu", True), (torch.float16, "gelu_tanh", False)]
    if impl not in ("cuda", "gluon"):
        widths = [(72, 136), (77, 131), (33, 257)]
    if impl != "gluon":
        kinds.append((torch.float32, "relu", True))

    def tensor(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
        return (torch.randn(shape) / 8).to(dtype).to(device).requires_grad_(grad)

    def linear(rows: int, D: int, F: int, dtype: torch.dtype, bias: bool, save: str, activation: str, layout: str, grad: bool) -> None:  # fmt: skip
        x = tensor(rows, D, dtype=dtype, grad=grad)
        options: dict[str, Any] = {"activation": activation, "save": save, "impl": impl, "gate_first": rows % 2 == 1}
        if layout == "separate":
            del options["gate_first"]
            weight, options["w_gate"] = tensor(F, D, dtype=dtype, grad=grad), tensor(F, D, dtype=dtype, grad=grad)
            b = tensor(F, dtype=dtype, grad=grad) if bias else None
            options["b_gate"] = tensor(F, dtype=dtype, grad=grad) if bias else None
        else:
            options["layout"] = layout
            weight = tensor(2 * F, D, dtype=dtype, grad=grad)
            b = tensor(2 * F, dtype=dtype, grad=grad) if bias else None
        y = fusewise.gated_linear(x, weight, b, **options)
        if grad:
            leaves = [t for t in (x, weight, b, options.get("w_gate"), options.get("b_gate")) if t is not None]
            torch.autograd.grad(y, leaves, tensor(*y.shape, dtype=dtype, grad=False))

    def mlp(rows: int, D: int, F: int, dtype: torch.dtype, bias: bool, save: str, activation: str, grad: bool) -> None:
        shapes = {"x": (rows, D), "w_gate": (F, D), "w_up": (F, D), "w_down": (D, F)}
        if bias:
            shapes |= {"b_gate": (F,), "b_up": (F,), "b_down": (D,)}
        tensors = {name: tensor(*shape, dtype=dtype, grad=grad) for name, shape in shapes.items()}
        z = fusewise.gated_mlp(**tensors, activation=activation, save=save, impl=impl)
        if grad:
            torch.autograd.grad(z, list(tensors.values()), tensor(*z.shape, dtype=dtype, grad=False))

    def in_tf32(call: Callable[[], Any]) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            call()
        finally:
            torch.set_float32_matmul_precision(before)

    if impl == "cuda":  # its own kernels, also where Gluon's take less time
        from fusewise.ops.gated_linear import _cuda

        _cuda._gluon_is_there = lambda: False
    # Rows vary fastest: they select few different kernels, so adjacent calls can share a process.
    n = 0
    for (dtype, activation, bias), (D, F), save in product(kinds, widths, ("preact", "input")):
        for rows in ROWS if widths[0] == (D, F) else (3, 65, 300):
            n += 1
            layout = ("stacked", "separate", "interleaved")[n % 3]
            what = f"{rows} x {D} x {F} {str(dtype)[6:]} {'bias ' if bias else ''}{save} {activation}"
            a = rows, D, F, dtype, bias, save, activation
            yield f"gated_linear {what} {layout}", lambda a=a, layout=layout: linear(*a, layout, True)
            if save == "preact":
                yield f"gated_linear {what} {layout} y alone", lambda a=a, layout=layout: linear(*a, layout, False)
                yield f"gated_mlp {what}", lambda a=a: mlp(*a, True)
    for rows in (3, 20, 64):  # tiles of more than 64 features, when F is distributed over an H200's SMs
        a = rows, 72, 14336, torch.bfloat16, True, "preact", "silu"
        for grad in (False, True):
            yield (
                f"{rows} rows, wide tiles{' with gradients' if grad else ''}",
                lambda a=a, grad=grad: linear(*a, "stacked", grad),
            )
    # On an H200: sideways tiles of 192, 128, 144, 160 and 208 rows, most of them halved at the end; the same rows in the few-rows kernel.
    for rows, F in ((176, 28672), (240, 14336), (272, 28672), (320, 14336), (400, 14336), (200, 14336)):
        a = rows, 72, F, torch.bfloat16, True, "preact", "silu"
        yield f"{rows} rows, {F} features", lambda a=a: linear(*a, "stacked", False)
    # Three rows are of odd width, which is copied for TMA.
    for rows, (D, F) in product(() if impl == "gluon" else (3, 130, 300), widths):
        for grad in (True, False):
            a = rows, D - rows % 2, F, torch.float32, True, "preact", "silu", "stacked", grad
            yield f"{rows} x {D} x {F} tf32{'' if grad else ' y alone'}", lambda a=a: in_tf32(lambda: linear(*a))
    for activation in ACTIVATIONS:
        a = (130, 72, 136, torch.bfloat16, True, "preact", activation)
        yield f"every activation: {activation}", lambda a=a: linear(*a, "stacked", True)
        yield f"every activation: mlp {activation}", lambda a=a: mlp(*a, True)
        yield f"every activation: {activation}, few rows", lambda a=a: linear(16, *a[1:], "stacked", False)
        yield f"every activation: {activation}, y alone", lambda a=a: linear(*a, "stacked", False)
    if impl not in ("cuda", "gluon"):
        yield from _gates(impl, device)


def _gates(impl: str, device: str) -> Calls:
    """The elementwise gate and its gradient."""
    from fusewise.ops.gated_linear import _gate

    def apart(rows: int, F: int, dtype: torch.dtype, activation: str) -> None:
        u, g = (torch.randn(rows, F).to(dtype).to(device).requires_grad_() for _ in range(2))
        y = _gate.gate(u, g, activation, impl=impl)
        torch.autograd.grad(y, (u, g), torch.randn(y.shape).to(y))

    def together(rows: int, F: int, dtype: torch.dtype, activation: str) -> None:
        x = torch.randn(rows, 2 * F).to(dtype).to(device).requires_grad_()
        y = _gate.stacked_gate(x, activation, gate_first=True, impl=impl)
        torch.autograd.grad(y, x, torch.randn(y.shape).to(y))

    for i, (rows, F) in enumerate(product((1, 3, 65, 300), (1, 136, 1025))):
        a = rows, F, (torch.bfloat16, torch.float16, torch.float32)[i % 3], ACTIVATIONS[i % len(ACTIVATIONS)]
        yield f"gate of two {a}", lambda a=a: apart(*a)
        yield f"gate of halves {a}", lambda a=a: together(*a)


OPERATIONS = {f.__name__: f for f in (rope, rope_and_cache, qk_norm_rope, gated_linear)}


def main(op: str, impl: str, device: str = "cuda") -> None:
    torch.manual_seed(0)
    calls = 0
    for name, call in OPERATIONS[op](impl, device):
        print(name, flush=True)  # before the call, so that a report follows its call's name
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=OPERATIONS)
    parser.add_argument("impl", help="an implementation, as triton")
    parser.add_argument("device", nargs="?", default="cuda", help="default: %(default)s")
    main(**vars(parser.parse_args()))
