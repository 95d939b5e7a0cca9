"""Inductor, torch.compile's backend: the kernels it generates, and what each reads and writes.

For the local device it compiles as usual. For an absent GPU it compiles the same graphs on fake tensors, with the
device that `absent_gpu` fakes: the resulting Triton code matches that on a real device, except for choices that
autotuning would make. Texts are captured before they are built.
"""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .. import ledger
from . import disassembly, triton_kernels
from .aten import multiplied
from .stage import Stage, short, tidy

#: Device properties that Inductor queries. Multiprocessor count and caches are those of an H200; the rest holds for
#: every GPU since Volta.
ABSENT: dict[str, Any] = {
    "name": "absent", "multi_processor_count": 132, "total_memory": 140 * 2**30, "warp_size": 32, "gcnArchName": "",
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 * 2**20,
}  # fmt: skip


@dataclass
class Generated:
    """One graph that Inductor turned into code."""

    code: str
    backward: bool
    kernels: list[ledger.Kernel]
    places: dict[str, str] = field(default_factory=dict)  # graph node -> source file:line


@dataclass
class Graph:
    """An ATen graph and the inputs it was traced with."""

    module: Any
    inputs: list[Any]
    backward: bool


@contextlib.contextmanager
def watched() -> Iterator[list[Generated]]:
    """Collects every graph for which Inductor generates code while active. The code is not built; the graph itself runs
    in its place, operator by operator."""
    from functorch.compile import make_boxed_func
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    found: list[Generated] = []

    def compile_to_module(self: Any) -> Any:
        written = self.codegen()[0]
        code = getattr(written, "value", written)
        found.append(Generated(code, bool(getattr(self, "is_backward", False)), traffic(self), places(self)))
        self.cache_key, self.cache_path = PyCodeCache.write(code)
        self.cache_linemap = []
        return SimpleNamespace(call=make_boxed_func(self.module.forward), __file__=self.cache_path, runner=None)

    settings = {"force_disable_caches": True, "compile_threads": 1}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", compile_to_module))
        stack.enter_context(torch._inductor.config.patch(settings))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield found


def places(lowering: Any) -> dict[str, str]:
    """The source location of each graph node: the last frame of the stack trace from Dynamo."""
    found = {}
    for node in lowering.graph.nodes:
        frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        if frames:
            found[node.name] = f"{short(frames[-1][0])}:{frames[-1][1]}"
    return found


def traffic(lowering: Any) -> list[ledger.Kernel]:
    """The scheduled kernels of a graph, with the scheduler's own figures for bytes: each buffer counts once per kernel,
    and only the part that the kernel's loop can touch."""
    kernels = []
    for node in lowering.scheduler.nodes:
        if node.is_extern() or not hasattr(node, "get_nodes"):
            name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        else:
            name = "fused_" + "_".join(sorted(set(_operators(node))))
        read = sum(node.get_read_write_buffer_accesses(include_reads=True, include_writes=False).values())
        written = sum(node.get_read_write_buffer_accesses(include_reads=False, include_writes=True).values())
        # A view only reinterprets memory, e.g. the real view of a complex tensor.
        view = getattr(getattr(node.node, "op_overload", None), "is_view", False)
        if written or (read and not view):
            kernels.append(ledger.Kernel(name=str(name), read=int(read), written=int(written), product=_product(node)))
    return kernels


def _product(node: Any) -> ledger.Product | None:
    """The matrix product that a scheduled node computes, with what is fused into it."""
    for part in node.get_nodes():
        origin = None if part.node is None else part.node.get_origin_node()
        if origin is not None and origin.op == "call_function":
            name = str(getattr(origin.target, "overloadpacket", "")).partition(".")[2]
            # A node that one of Inductor's passes has made may have no value.
            values = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in origin.args]
            if (found := multiplied(name, values)) is not None:
                return found
    return None


def _operators(node: Any) -> Iterator[str]:
    """The ATen operators that a scheduled node computes."""
    for part in node.get_nodes():
        for origin in getattr(part.node, "origins", ()):
            packet = getattr(origin.target, "overloadpacket", None)
            if origin.op == "call_function" and packet is not None:
                yield str(packet).partition(".")[2]


def stages(generated: Sequence[Generated], target: str, device_code: str = "") -> list[Stage]:
    """`triton` or `cpp` for each kernel, followed by Triton's stages for `device_code`, and the `wrapper`."""
    found = []
    for graph in generated:
        suffix = " backward" if graph.backward else ""
        kernels, wrapper = split(graph.code)
        for name, language, text in kernels:
            stage = "triton" if language == "python" else "cpp"
            lines = _lines(text, graph.places)
            if stage == "triton":
                lines |= {n: f"{name}.py:{n}" for n in range(1, len(text.splitlines()) + 1) if n not in lines}
            found.append(Stage(stage=stage, language=language, part=name, text=tidy(text), target=target, lines=lines))
            if stage == "triton" and device_code:
                below = triton_kernels.stages(compiled(name, text, device_code), name, device_code)
                found += [replace(s, lines=_through(s.lines, lines)) for s in below]
            if stage == "cpp":
                found += assembly(name, text)
        found.append(
            Stage(stage="wrapper", language="python", part=f"call{suffix}", text=tidy(wrapper), target=target,
                  lines=_lines(wrapper, graph.places))
        )  # fmt: skip
    return found


def assembly(name: str, text: str) -> list[Stage]:
    """The machine code of a C++ kernel, built as Inductor builds it; nothing without objdump."""
    from torch._inductor.codecache import CppCodeCache

    if shutil.which("objdump") is None:
        return []
    library = CppCodeCache.load(text)
    return [disassembly.library(Path(library._name), only=r"^kernel\b", part=name)]


def _through(lines: Mapping[int, str], generated: Mapping[int, str]) -> dict[int, str]:
    """Compose mappings: lines that map to a generated file are mapped on to its source."""
    found = {}
    for line, place in lines.items():
        path, _, number = place.rpartition(":")
        found[line] = generated.get(int(number), place) if "torchinductor" in path or "/" not in path else place
    return found


_KERNEL = re.compile(
    r"(?P<comment>(?:^#[^\n]*\n)*)^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\([^'\"]*?(?:\[[^\]]*\],\s*)?(?:'\w+',\s*)?"
    r"r?'''(?P<text>.*?)'''[^\n]*\)\n",
    re.MULTILINE | re.DOTALL,
)


def split(code: str) -> tuple[list[tuple[str, str, str]], str]:
    """Split Inductor's output into kernels (name, language, text), each below its comment, and the wrapper code."""
    kernels = []

    def take(match: re.Match[str]) -> str:
        python = match["kind"] == "triton"
        comment = match["comment"] if python else re.sub(r"^#", "//", match["comment"], flags=re.MULTILINE)
        comment = re.sub(r"^(#|//) kernel path: .*\n", "", comment, flags=re.MULTILINE)
        kernels.append((match["name"], "python" if python else "cpp", comment + match["text"].strip("\n") + "\n"))
        return f"# {match['name']}: a kernel, shown by itself\n"

    wrapper = _KERNEL.sub(take, code)
    end = wrapper.find("\ndef get_args(")  # benchmark code follows
    end = end if end >= 0 else wrapper.find("\ndef benchmark_compiled_module(")
    return kernels, (wrapper if end < 0 else wrapper[:end]).rstrip() + "\n"


def _lines(text: str, places: dict[str, str]) -> dict[int, str]:
    """Line mapping from a kernel's comment, which names the graph nodes it computes. If all come from one line, so does
    the kernel; in the wrapper, what follows the comment."""
    lines = {}
    of_kernel = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if (node := re.match(r"\s*(?:#|//)\s+%(\w+) :", line)) and node[1] in places:
            lines[number] = places[node[1]]
            if "PlaceHolder" not in line:
                of_kernel.add(places[node[1]])
    if len(of_kernel) == 1:
        (place,) = of_kernel
        lines |= {number: place for number in range(1, len(text.splitlines()) + 1) if number not in lines}
    return lines


def compiled(name: str, text: str, target: str) -> Any:
    """A kernel that Inductor generated, compiled by Triton for `target` with the first of its configurations."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.compiler import ASTSource

    with triton_kernels.driver_for(target):
        module = PyCodeCache.load(text.replace("triton_helpers.set_driver_to_gpu()", ""))
        tuner = getattr(module, name)
        config = tuner.configs[0]
        meta = tuner.triton_meta
        signature = dict(meta["signature"])
        constants = {**meta.get("constants", {}), **config.kwargs}
        # Inductor lists backend options among the constants; the kernel does not take them.
        constants = {key: value for key, value in constants.items() if key in tuner.fn.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(tuner.fn, signature, constants, meta["configs"][0])
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        options["enable_fp_fusion"] = meta.get("enable_fp_fusion", True)
        return triton.compile(source, target=triton_kernels.gpu_target(target), options=options)


@contextlib.contextmanager
def absent_gpu(target: str) -> Iterator[None]:
    """Make torch, Inductor and Triton believe in a CUDA device of `target`. Only for a dedicated process: nothing can
    run on the device."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses import fake_tensor

    major, minor = divmod(triton_kernels.capability(target), 10)
    properties = SimpleNamespace(**ABSENT, major=major, minor=minor)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_, **__: (major, minor),
        "get_device_name": lambda *_: properties.name,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda *_: -1,
        "_maybe_exchange_device": lambda *_: -1,
        "_lazy_init": lambda: None,
    }
    interface = {name: staticmethod(answers[name]) for name in list(answers)[:4]}
    interface["get_compute_capability"] = staticmethod(lambda *_: 10 * major + minor)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, static in interface.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, static))
        for name in ("current_device", "get_device_properties"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, interface[name]))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", return_value=None))
        # Patterns for attention and padded products are traced on real device tensors, so none is replaced here.
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", return_value=None))
        # These two, of which torch makes embedding's backward and Inductor writes to a slice, ask for the device's guard,
        # and a build without CUDA has none; their operators do not.
        stack.enter_context(mock.patch.object(torch.Tensor, "__invert__", lambda x: torch.bitwise_not(x)))
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", lambda *args: torch.ops.aten.copy_(*args)))
        stack.enter_context(triton_kernels.driver_for(target))
        _forget_triton()
        stack.callback(_forget_triton)
        yield


def _forget_triton() -> None:
    """torch caches whether Triton has a device."""
    from torch.utils import _triton

    for value in vars(_triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def lowered(call: Callable[[Callable[..., Any]], Callable[[], Any]], function: Callable[..., Any]) -> list[Graph]:
    """The ATen graphs that enter Inductor, decomposed and partitioned into forward and backward. `call(compiled)`
    returns a callable that runs the pass with it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found: list[Graph] = []

    def keep(backward: bool) -> Callable[..., Any]:
        def compiler(module: Any, inputs: Sequence[Any]) -> Any:
            with unset_fake_temporarily():  # its constants are real tensors
                found.append(Graph(copy.deepcopy(module), list(inputs), backward))
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(False), bw_compiler=keep(True),
        decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch.compiler.reset()
    call(torch.compile(function, backend=backend, dynamic=False))()
    torch.compiler.reset()
    return found


def cross_compiled(graphs: Sequence[Graph], target: str) -> list[Generated]:
    """What Inductor generates for `target` from graphs traced on another device."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    found = []
    for graph in graphs:
        for node in graph.module.graph.nodes:  # a graph traced on a CPU creates new tensors there
            if getattr(node.kwargs.get("device"), "type", "") == "cpu":
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        graph.module.recompile()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            absent_gpu(target),
            watched() as generated,
            mode,
            torch._guards.tracing(torch._guards.TracingContext(mode)),
        ):
            inputs = [_on_gpu(x) if isinstance(x, torch.Tensor) else x for x in graph.inputs]
            FakeTensorProp(graph.module, mode).propagate_dont_convert_inputs(*inputs)
            compile_fx_inner(graph.module, inputs, is_backward=graph.backward, is_inference=False)
        found += generated
    return found


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A fake CUDA tensor like `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
