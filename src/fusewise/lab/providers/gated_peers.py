"""Widely used libraries for gated linear units, each called as its documentation says.

Weights are converted to each library's layout in `own`, untimed, because a user of the library would store them so.
Imports happen in the provider's own worker process: some of these packages monkey-patch others on import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..plugin import Provider, Run, Unsupported, check_dtype, require, supported
from ..problem import Problem
from ..targets.geglu import GatedProblem


class _Peer(Provider):
    """A library's gated unit, or its gate after PyTorch's product; in an MLP followed by PyTorch's down projection."""

    ops: ClassVar[tuple[str, ...]] = ("geglu", "gated_mlp")
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    activations: ClassVar[tuple[str, ...]] = ("gelu_tanh", "silu")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    backward: ClassVar[bool] = True

    def build(self, problem: Problem) -> Run:
        gated = supported(self, problem, GatedProblem)
        if gated.case.activation not in self.activations:
            raise Unsupported(f"has {' and '.join(self.activations)}, not {gated.case.activation}")
        check_dtype(gated.dtype, self.dtypes)
        if problem.task.pass_ != "fwd" and not self.backward:
            raise Unsupported("has no gradient of its own for this product")
        return self.unit(gated) if problem.op == "geglu" else projected(self.unit(gated))

    def unit(self, problem: GatedProblem) -> Run:
        raise NotImplementedError


def projected(run: Run) -> Run:
    """The unit followed by the down projection, whose weight is the last tensor."""
    return replace(
        run,
        call=lambda *xs: functional.linear(run.call(*xs[:-1]), xs[-1]),
        own=lambda *xs: (*run.own(*xs[:-1]), xs[-1]),
        restore=lambda *xs: (*run.restore(*xs[:-1]), xs[-1]),
    )


def _projections(problem: GatedProblem, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """gate and value (M, F) from separate products, as in transformers' MLPs."""
    x, *rest = tensors
    value, gate, value_bias, gate_bias = problem.halves(*rest)
    return functional.linear(x, gate, gate_bias), functional.linear(x, value, value_bias)


class Liger(_Peer):
    """liger-kernel: two PyTorch products, and the gate as one kernel (`LigerGEGLUMLP`, `LigerSwiGLUMLP`)."""

    name, module, packages = "liger", "liger_kernel", ("liger-kernel",)
    install = "pip install liger-kernel"

    def unit(self, problem: GatedProblem) -> Run:
        if problem.case.activation == "silu":
            gate = require("liger_kernel.ops.swiglu", self.install).LigerSiLUMulFunction
        else:
            gate = require("liger_kernel.ops.geglu", self.install).LigerGELUMulFunction
        return Run(lambda *xs: gate.apply(*_projections(problem, xs)), form="two-kernels")


class Unsloth(_Peer):
    """unsloth: two PyTorch products and its gate kernels, whose backward overwrites the saved tensors."""

    name, module, packages = "unsloth", "unsloth", ("unsloth",)
    install = "pip install unsloth"
    activations = ("gelu_tanh", "gelu", "silu")

    def unit(self, problem: GatedProblem) -> Run:
        if problem.case.activation == "silu":
            kernels = require("unsloth.kernels.swiglu", self.install)
            forward, backward = kernels.swiglu_fg_kernel, kernels.swiglu_DWf_DW_dfg_kernel
        else:
            kernels = require("unsloth.kernels.geglu", self.install)
            form = "approx" if problem.case.activation == "gelu_tanh" else "exact"
            forward = getattr(kernels, f"geglu_{form}_forward_kernel")
            backward = getattr(kernels, f"geglu_{form}_backward_kernel")

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
                ctx.save_for_backward(gate, value)
                return forward(gate[None], value[None])[0]  # type: ignore[no-any-return]

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
                _, dvalue, dgate = backward(dy.contiguous(), *ctx.saved_tensors)
                return dgate, dvalue

        return Run(lambda *xs: Gate.apply(*_projections(problem, xs)), form="two-kernels")  # type: ignore[no-untyped-call]


class TransformerEngine(_Peer):
    """TransformerEngine: one PyTorch product with the gate half first, and its CUDA gate."""

    name, module = "transformer_engine", "transformer_engine"
    packages = ("transformer_engine", "transformer_engine_torch")
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]'"

    def unit(self, problem: GatedProblem) -> Run:
        require("transformer_engine.pytorch", self.install)  # loads the libraries that the next import needs
        kernels = require("transformer_engine_torch", self.install)
        name = "swiglu" if problem.case.activation == "silu" else "geglu"
        forward, backward = getattr(kernels, name), getattr(kernels, f"d{name}")

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, z: Tensor) -> Tensor:
                ctx.save_for_backward(z)
                return forward(z, None)  # type: ignore[no-any-return]

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return backward(dy, *ctx.saved_tensors, None)  # type: ignore[no-any-return]

        own: Any = (lambda *xs: xs) if problem.case.gate_first else (lambda *xs: problem.swapped(xs))
        return Run(
            lambda *xs: Gate.apply(functional.linear(*xs)),  # type: ignore[no-untyped-call]
            own=own,
            restore=lambda *gradients: own(*gradients),  # swapping is its own inverse
            form="two-kernels",
        )


#: QuACK's names of the gates.
_QUACKS = {"gelu_tanh": "geglu", "silu": "swiglu", "relu": "reglu", "sigmoid": "glu"}


class _Quack(_Peer):
    """QuACK's product with the gate in its epilogue, autotuned; no pre-activations stored."""

    module, packages = "quack", ("quack-kernels", "nvidia-cutlass-dsl")
    install = "pip install quack-kernels"
    activations = tuple(_QUACKS)
    dtypes = (torch.bfloat16, torch.float16)
    ops = ("geglu",)
    backward = False
    stacked: ClassVar[bool]

    def unit(self, problem: GatedProblem) -> Run:
        gemm = require("quack.gemm_interface", self.install).gemm_gated
        options: dict[str, Any] = {"activation": _QUACKS[problem.case.activation], "store_preact": False}
        if self.stacked:
            options["concat_layout"] = ("B", "bias") if problem.case.bias else ("B",)

        def own(*xs: Tensor) -> tuple[Tensor, ...]:
            if not self.stacked:
                return problem.interleaved(xs)
            return xs if problem.case.gate_first else problem.swapped(xs)

        def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return gemm(x, weight.T, bias=bias, **options)[1]  # type: ignore[no-any-return]

        return Run(call, own=own, backward=False, form="fused")


class QuackInterleaved(_Quack):
    """Gate and value rows interleaved, QuACK's native layout."""

    name, stacked = "quack-interleaved", False


class QuackStacked(_Quack):
    """The gate half before the value half, through QuACK's own view."""

    name, stacked = "quack-stacked", True


class QuackMlp(Provider):
    """QuACK's whole MLP, forward and backward, autotuned, with gate and value rows interleaved as it requires. Without
    bias: there QuACK leaves the bias gradient to PyTorch's autograd."""

    name, module, packages = "quack", "quack", ("quack-kernels", "nvidia-cutlass-dsl")
    install = "pip install quack-kernels"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    ops: ClassVar[tuple[str, ...]] = ("gated_mlp",)
    recompute: ClassVar[bool] = False

    def build(self, problem: Problem) -> Run:
        gated = supported(self, problem, GatedProblem)
        if gated.case.activation not in _QUACKS or gated.case.bias:
            raise Unsupported(f"has {', '.join(_QUACKS)} without a bias, not {gated.shape()}")
        if gated.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported("takes bfloat16, float16 only")
        if self.recompute and problem.task.pass_ == "fwd":
            raise Unsupported("without gradients nothing is saved: see quack")
        mlp = require("quack.mlp", self.install).mlp_func
        options = {"activation": _QUACKS[gated.case.activation], "recompute": self.recompute}

        def own(*xs: Tensor) -> tuple[Tensor, ...]:
            return *gated.interleaved(xs[:-1]), xs[-1]

        def restore(dx: Tensor, dweight: Tensor, ddown: Tensor) -> tuple[Tensor, ...]:
            dgate, dvalue = dweight[::2], dweight[1::2]
            return dx, torch.cat((dgate, dvalue) if gated.case.gate_first else (dvalue, dgate)), ddown

        return Run(lambda *xs: mlp(*xs, **options), own=own, restore=restore)


class QuackMlpRecompute(QuackMlp):
    """Saves only x for backward, at the cost of one more product."""

    name, recompute = "quack-recompute", True
