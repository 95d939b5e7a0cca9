"""fusewise's implementations, each through the public function with an explicit `impl=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import fusewise
from fusewise._shared import build
from fusewise.ops.gated_linear import _host as gated_host
from fusewise.ops.gated_linear import _onednn, _op
from fusewise.ops.rope import _host as rope_host

from ..code.stage import Stage
from ..ledger import Kernel
from ..plugin import Provider, Run, Unsupported, check_dtype, supported
from ..problem import Problem
from ..targets.geglu import GatedProblem
from ..targets.rope import RopeProblem


class Ours(Provider):
    """Common base of our implementations, which show their code."""

    impl: ClassVar[str]

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import ours

        return ours.stages(problem, self.build(problem), self.impl, target)

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import ours

        return ours.traffic(problem, self.build(problem), self.impl, target)

    def versions(self) -> dict[str, str]:
        return super().versions() | {"fusewise": fusewise.__version__}


class _Fusewise(Ours):
    in_place: ClassVar[bool] = False
    ops: ClassVar[tuple[str, ...]] = ("rope",)
    packages: ClassVar[tuple[str, ...]] = ("torch", "fusewise")

    def build(self, problem: Problem) -> Run:
        rope = supported(self, problem, RopeProblem)
        arguments = {**rope.inputs.kwargs, "impl": self.impl}
        if rope.case.serving:
            if self.in_place:
                raise Unsupported(f"serving engines call it in place anyway: see fusewise-{self.impl}")
            return served(rope, arguments)
        if self.in_place and problem.task.pass_ != "fwd":
            raise Unsupported("in place, it would overwrite leaf tensors that require gradients")
        function = fusewise.rope_ if self.in_place else fusewise.rope
        return Run(lambda *xs: function(*xs, **arguments), in_place=self.in_place)


def served(problem: RopeProblem, arguments: dict[str, Any]) -> Run:
    """In place on flat tensors; the views by head are part of the timed call."""

    q_width, k_width = (x.shape[-1] for x in problem.inputs.operands)

    def call(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tokens = q.shape[0]
        fusewise.rope_(q.view(tokens, -1, q_width), k.view(tokens, -1, k_width), **arguments)
        return q, k

    return Run(call, in_place=True, backward=False)


class Reference(_Fusewise):
    """The specification in plain torch."""

    name, impl = "fusewise-reference", "reference"


def called_natively(recipe: build.Recipe) -> None:
    """Build the C++ path to the kernels for repeated calls, as after `fusewise build`."""
    try:
        build.prepared(*recipe)
    except build.BuildError as error:
        print(f"calls go through Python: {error}")  # goes to the worker's log


class Cpu(_Fusewise):
    """The native vectorised kernel, as after `fusewise build`."""

    name, impl, devices = "fusewise-cpu", "cpu", ("cpu",)

    def build(self, problem: Problem) -> Run:
        run = super().build(problem)
        called_natively(rope_host.recipe())
        return run


class CpuInPlace(Cpu):
    name, in_place, default = "fusewise-cpu-inplace", True, False


class Triton(_Fusewise):
    """The Triton kernel."""

    name, impl, devices, module = "fusewise-triton", "triton", ("cuda",), "triton"
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")


class TritonInPlace(Triton):
    name, in_place, default = "fusewise-triton-inplace", True, False


class TritonGathered(Triton):
    """The Triton kernel on table rows gathered before the call, once for all layers, as in Liger and transformers: this
    saves the dependent load through the positions."""

    name, default = "fusewise-triton-gathered", False

    def build(self, problem: Problem) -> Run:
        rope = supported(self, problem, RopeProblem)
        if rope.case.serving:
            raise Unsupported("takes gathered rows of the table, not positions and a cache")
        if rope.inputs.positions is None:
            raise Unsupported("the rows of the table are in the order of the tokens already")
        cos, sin = rope.rows(rope.inputs.cos.dtype)
        arguments = {**rope.inputs.kwargs, "cos": cos, "sin": sin, "impl": self.impl}
        del arguments["positions"]
        return Run(lambda *xs: fusewise.rope(*xs, **arguments))


class Cuda(_Fusewise):
    """The CUDA kernel."""

    name, impl, devices = "fusewise-cuda", "cuda", ("cuda",)


class CudaInPlace(Cuda):
    name, in_place = "fusewise-cuda-inplace", True

    def chosen(self, op: str, device: str) -> bool:
        """Only on a GPU, beside the libraries that work in place there."""
        return super().chosen(op, device) and device.startswith("cuda")


class _Gated(Ours):
    """The gated linear unit or its MLP, saving pre-activations for backward."""

    save: ClassVar[Literal["preact", "input"]] = "preact"
    form: ClassVar[str] = "fused"
    ops: ClassVar[tuple[str, ...]] = ("geglu", "gated_mlp")
    packages: ClassVar[tuple[str, ...]] = ("torch", "fusewise")

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def build(self, problem: Problem) -> Run:
        gated = supported(self, problem, GatedProblem)
        check_dtype(gated.dtype, self.dtypes)
        on_gpu = problem.device.type == "cuda"  # without a GPU its code can still be inspected
        if on_gpu and (why := _op.choice.unavailable(self.impl, "cuda", gated.dtype)) is not None:
            raise Unsupported(why)
        if self.save == "input" and problem.task.pass_ == "fwd":
            raise Unsupported("without gradients nothing is saved: see fusewise-" + self.impl)
        by_library = self.impl == "triton" and gated.dtype == torch.float32
        form = "unfused" if by_library else self.form
        if self.save == "input":
            form = f"{form}-recompute"
        return Run(lambda *xs: gated.operation(*xs, save=self.save, impl=self.impl), form=form)


class GatedReference(_Gated):
    """The specification in plain torch."""

    name, impl, form = "fusewise-reference", "reference", ""


class GatedCpu(_Gated):
    """The platform's matrix product and a native gate, as after `fusewise build`."""

    name, impl, devices, form = "fusewise-cpu", "cpu", ("cpu",), "chunked"

    def build(self, problem: Problem) -> Run:
        run = super().build(problem)
        called_natively(gated_host.recipe())
        if supported(self, problem, GatedProblem).dtype == torch.float32 and _onednn.there():
            way = "chunked-apart-dw" if _onednn.takes_transposed() else "chunked-apart"
            run = replace(run, form=run.form.replace("chunked", way))
        return run


class GatedCpuRecompute(GatedCpu):
    """Saves only the inputs for backward."""

    name, save = "fusewise-cpu-recompute", "input"


class GatedTriton(_Gated):
    """Both products and the gate in one Triton kernel."""

    name, impl, devices, module = "fusewise-triton", "triton", ("cuda",), "triton"
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")


class GatedTritonRecompute(GatedTriton):
    """Saves only the inputs for backward."""

    name, save = "fusewise-triton-recompute", "input"


class GatedCuda(_Gated):
    """Both products and the gate in one CUDA kernel for Hopper, in 16 bits persistent and warp-specialised, as after
    `fusewise build`."""

    name, impl, devices, module = "fusewise-cuda", "cuda", ("cuda",), "triton"  # Gluon covers the rest
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")

    def build(self, problem: Problem) -> Run:
        run = super().build(problem)
        half = problem.dtype != torch.float32  # which goes through Python
        if problem.device.type == "cuda" and problem.task.pass_ == "fwd" and half:
            called_natively(gated_host.recipe())
        return run


class GatedCudaRecompute(GatedCuda):
    """Saves only the inputs for backward."""

    name, save = "fusewise-cuda-recompute", "input"


class GatedCudaTraining(GatedCuda):
    """A training step's forward alone: it also writes the pre-activations and keeps them."""

    name, default = "fusewise-cuda-training", False
    ops = ("geglu",)

    def build(self, problem: Problem) -> Run:
        if problem.task.pass_ != "fwd":
            raise Unsupported("with gradients they are kept anyway: see fusewise-cuda")
        run = super().build(problem)
        return replace(run, enter=lambda *xs: tuple(x.detach().requires_grad_() for x in xs), form="fused-training")


class GatedGluon(_Gated):
    """Both products and the gate in one persistent, warp-specialised Gluon kernel for Hopper."""

    name, impl, devices, module = "fusewise-gluon", "gluon", ("cuda",), "triton"
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")
    dtypes = (torch.bfloat16, torch.float16)


class GatedGluonRecompute(GatedGluon):
    """Saves only the inputs for backward."""

    name, save = "fusewise-gluon-recompute", "input"
