"""Exported graphs can be trained like their modules: their nodes record gradients themselves. Also packages and torch.jit traces."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewise
from fusewise._shared import build
from fusewise.ops.gated_linear._gate import gate, stacked_gate
from fusewise.ops.rope import _host

# An operator without an autograd formula warns about missing gradients.
pytestmark = [
    pytest.mark.filterwarnings("error:.*autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # strict export makes one
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class After(nn.Module):
    """A module after a linear layer, whose output is also used directly."""

    def __init__(self, call: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.call = nn.Linear(8, 8), nn.ModuleList(parts), call

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.call(h, *self.parts)
        return sum((y * y.detach().cos()).sum() for y in (found if isinstance(found, tuple) else (found,))) + h.sum()


def modules() -> dict[str, tuple[After, str]]:
    rotary, norm = (
        fusewise.nn.RotaryEmbedding(8),
        fusewise.nn.QKNormRope(fusewise.nn.RotaryEmbedding(8), weight_offset=0.5),
    )
    unit, mlp = (make(8, 12, activation="silu") for make in (fusewise.nn.GatedLinear, fusewise.nn.GatedMLP))

    def heads(h: Tensor) -> Tensor:
        return h.unsqueeze(-2)

    return {
        "rope of q": (After(lambda h, rotary: rotary(heads(h)), rotary), "rope"),
        "rope of q and k": (After(lambda h, rotary: rotary(heads(h), heads(2 * h)), rotary), "rope_qk"),
        "rope of q, not of k": (After(lambda h, rotary: rotary(heads(h), heads(h.detach())), rotary), "rope_qk"),
        "norm and rope of q": (
            After(lambda h, rotary: fusewise.qk_norm_rope(heads(h), None, h[0, 0], inv_freq=rotary.inv_freq), rotary),
            "qk_norm_rope",
        ),
        "norm and rope of q and k": (After(lambda h, norm: norm(heads(h), heads(2 * h)), norm), "qk_norm_rope"),
        "gated linear": (After(lambda h, unit: unit(h), unit), "gated_linear"),
        "gated mlp": (After(lambda h, mlp: mlp(h), mlp), "gated_linear"),
        "gate": (After(lambda h: gate(h, 2 * h, "gelu")), "gate"),
        "stacked gate": (After(lambda h: stacked_gate(h, "gelu", gate_first=True)), "gate"),
    }


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    module(x).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("how", ["strict", "not strict", "decomposed", "compiled"])
@pytest.mark.parametrize("name", modules())
def test_an_exported_graph_has_the_gradients_of_its_module(name: str, how: str) -> None:
    torch.manual_seed(0)
    module, operator = modules()[name]
    x = torch.randn(2, 5, 8)
    program = torch.export.export(module, (x,), strict=how == "strict")
    if how == "decomposed":
        program = program.run_decompositions()
    nodes = [str(node.target) for node in program.graph.nodes if "fusewise" in str(node.target)]
    assert nodes == [f"fusewise.{operator}.default"]
    made = program.module()
    run: Any = torch.compile(made, backend="aot_eager") if how == "compiled" else made
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
    made.zero_grad()
    run(x).backward()
    want = gradients(module, x)
    found = {name: p.grad for name, p in made.named_parameters()}
    assert sorted(found) == sorted(want)
    for key, gradient in want.items():
        torch.testing.assert_close(found[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("sections", [None, (1, 2, 1)], ids=["one axis", "three axes"])
@pytest.mark.parametrize("batched", [True, False], ids=["of each sequence", "shared"])
def test_positions_leave_the_tokens_free_in_an_export_for_one_batch_size(batched: bool, sections: Any) -> None:
    class Rotation(nn.Module):
        def forward(self, q: Tensor, positions: Tensor) -> Any:
            return fusewise.rope(q, inv_freq=torch.ones(4), positions=positions, sections=sections)

    def inputs(tokens: int) -> tuple[Tensor, Tensor]:
        shape = (*((3,) if sections else ()), *((2,) if batched else ()), tokens)
        return torch.randn(2, tokens, 4, 8), torch.randint(0, 9, shape)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    q, positions = inputs(6)
    free = ({1: tokens}, {positions.dim() - 1: tokens})
    program = torch.export.export(Rotation(), (q, positions), dynamic_shapes=free).module()
    for count in (6, 2, 3):  # also as many as sequences, and as axes
        x = inputs(count)
        torch.testing.assert_close(program(*x), Rotation()(*x))


class Rotations(nn.Module):
    """Calls whose operators get empty lists: of strides, and of weights."""

    def forward(self, q: Tensor, k: Tensor, inv_freq: Tensor) -> Any:
        one = fusewise.rope(q, inv_freq=inv_freq)
        return *fusewise.rope(one, k, inv_freq=inv_freq), *fusewise.qk_norm_rope(q, k, None, None, inv_freq=inv_freq)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch, in packaging
def test_a_packaged_graph_gives_the_results_of_its_module(tmp_path: Path) -> None:
    """The runtime of a package passes None for a list without entries (seen with torch 2.13)."""

    def inputs(tokens: int) -> tuple[Tensor, ...]:
        return torch.randn(2, tokens, 4, 8), torch.randn(2, tokens, 2, 8), torch.rand(4)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(Rotations(), inputs(6), dynamic_shapes=({1: tokens}, {1: tokens}, None))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rotations.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        for operators in ("Python", "C++"):
            if operators == "C++":
                try:
                    _host.extension()  # whose operators take the place of Python's
                except build.BuildError as error:
                    pytest.skip(str(error))
            for count in (6, 9, 9):  # the last is cached
                x = inputs(count)
                for found, want in zip(packaged(*x), Rotations()(*x), strict=True):
                    torch.testing.assert_close(found, want)


TRACED = """
import os, sys, torch, fusewise
x, table, weight = torch.ones(2, 3, 4, 8), torch.ones(4).requires_grad_(), torch.ones(6, 8).requires_grad_()
cache = torch.zeros(2, 4, 4, 8).requires_grad_()
calls = {
    "rope": lambda x: fusewise.rope(x, inv_freq=table),
    "qk_norm_rope": lambda x: fusewise.qk_norm_rope(x, None, None, inv_freq=table),
    "rope_and_cache_": lambda x: fusewise.rope_and_cache_(x[0], x[1], x[1], cache, cache, inv_freq=table),
    "gated_linear": lambda x: fusewise.gated_linear(x, weight, activation="silu"),
}
for name, call in calls.items():
    if not os.fork():
        with torch.no_grad():
            torch.jit.trace(call, (x,))
        os._exit(0)
    print(f"{name}: {os.waitstatus_to_exitcode(os.wait()[1])}", file=sys.stderr, flush=True)
"""


class Unit(nn.Module):
    """A gated linear unit whose weights are inputs."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, *of_gate: Tensor) -> Tensor:
        w_gate, b_gate = of_gate or (None, None)
        return fusewise.gated_linear(x, weight, bias, w_gate=w_gate, b_gate=b_gate, activation="silu")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("records", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("trace", ["export", "jit"])
def test_a_traced_unit_takes_weights_of_other_strides(trace: str, separate: bool, rows: int, records: bool) -> None:
    """Eager calls refuse them, since kernels cannot read them; a graph does not ask again."""
    sizes = [(rows, 128), (96, 128), (96,), *([(96, 128), (96,)] if separate else [])]
    dense = tuple((torch.randn(size) / 4).requires_grad_(records) for size in sizes)
    strided = [t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_(records) for t in dense]
    if trace == "jit":
        graph: Any = torch.jit.trace(Unit(), dense, check_trace=False)
    else:
        graph = torch.export.export(Unit(), dense).module()
    y, expected = graph(*strided), Unit()(*dense)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if records:
        gradients = torch.autograd.grad(y.square().sum(), strided)
        wanted = torch.autograd.grad(expected.square().sum(), dense)
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-3)


def test_a_jit_trace_refuses_the_constants_that_torch_refuses() -> None:
    """torch raises when their sizes are first read and ends the trace; continuing would be a segmentation fault, so each call has
    a process, forked from one that has imported torch."""
    child = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True)
    *told, end = re.split(r"^(\w+: -?\d+)\n", child.stderr, flags=re.MULTILINE)
    assert (end, child.returncode) == ("", 0), child.stderr
    assert told[1::2] == ["rope: 1", "qk_norm_rope: 1", "rope_and_cache_: 1", "gated_linear: 1"], child.stderr
    assert all("Cannot insert a Tensor that requires grad as a constant" in errors for errors in told[::2]), (
        child.stderr
    )
