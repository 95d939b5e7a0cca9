"""fusewise's own implementations: what each call starts, and its code from source to machine instructions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

import fusewise

from ..ledger import Kernel, extent
from ..plugin import Run, Unsupported
from ..problem import Problem
from . import aten, disassembly, passes, pytorch, triton_kernels
from .stage import Stage, short

FOLDERS = {"rope": "rope", "geglu": "gated_linear"}
#: How native code calls a type in the names of its functions.
_KINDS = {"fp32": "float", "bf16": "Bf16", "fp16": "Fp16"}


def stages(problem: Problem, run: Run, impl: str, target: str) -> list[Stage]:
    """The stages of `impl` for a problem."""
    if impl == "reference":
        return [pytorch.operators(problem, run, within="fusewise").stage()]
    if impl == "cpu":
        return cpu_stages(problem, run)
    if impl == "triton":
        return triton_stages(problem, run, target)
    raise Unsupported(f"impl {impl!r} does not show its code")


def traffic(problem: Problem, run: Run, impl: str, target: str) -> list[Kernel]:
    """The kernels that `impl` starts for a problem, and the operators of torch around them."""
    seen = aten.Operators(within="fusewise", used=used(problem))
    before, step = passes.steps(problem, run)
    with contextlib.ExitStack() as stack:
        if impl == "triton":
            stack.enter_context(_serving_any_device(problem))
            stack.enter_context(triton_kernels.recorded(target, seen.kernels.append, used(problem)))
        elif impl == "cpu":
            stack.enter_context(_native(problem, seen.kernels, used(problem)))
        elif impl != "reference":
            raise Unsupported(f"impl {impl!r} does not tell what it reads and writes")
        state = before()
        seen.kernels.clear()  # a forward before a timed backward
        with seen:
            step(state)
    return seen.kernels


def used(problem: Problem) -> Mapping[int, int]:
    """Address of a tensor -> the bytes of it that a call can need at most, where that is not all of it: of RoPE's table
    the rows of the positions that occur."""
    if problem.op != "rope":
        return {}
    inputs, case = problem.inputs, problem.case  # type: ignore[attr-defined]
    rows = case.seqlen if inputs.positions is None else min(case.rows, case.batch * case.seqlen)
    tables = [x for x in inputs.kwargs.values() if isinstance(x, Tensor) and x.shape[:1] == inputs.cos.shape[:1]]
    return {x.data_ptr(): rows * x.stride(0) * x.element_size() for x in tables}


def _module(problem: Problem, impl: str) -> ModuleType:
    return importlib.import_module(f"fusewise.ops.{FOLDERS[problem.op]}._{impl}")


@contextlib.contextmanager
def _serving_any_device(problem: Problem) -> Iterator[None]:
    """The Triton implementation takes tensors of any device: they are not touched while launches are recorded."""
    operation = importlib.import_module(f"fusewise.ops.{FOLDERS[problem.op]}._op")
    with mock.patch.object(_module(problem, "triton"), "unavailable", return_value=None):
        operation.unavailable.cache_clear()
        operation.serving.cache_clear()
        yield
    operation.unavailable.cache_clear()
    operation.serving.cache_clear()


def triton_stages(problem: Problem, run: Run, target: str) -> list[Stage]:
    """`source`, then `ttir` to `sass` of every kernel that the pass launches."""
    with _serving_any_device(problem), triton_kernels.recorded(target) as launches:
        passes.once(problem, run)
    found: list[Stage] = []
    for launch in launches:
        if launch.name not in {stage.part for stage in found}:
            found += triton_kernels.stages(launch.compiled, launch.name, target)
    sources = dict.fromkeys(place.rpartition(":")[0] for stage in found for place in stage.lines.values())
    root = Path(fusewise.__file__).parents[1]
    return [*(_file(root / path, "python") for path in sources if (root / path).is_file()), *found]


def cpu_stages(problem: Problem, run: Run) -> list[Stage]:
    """`source` (C++), then the machine code of the functions for the problem's dtype."""
    from fusewise._shared import build

    passes.once(problem, run)
    folder = Path(str(_module(problem, "cpu").__file__)).parent
    files = sorted(folder.glob("*.cpp"))
    others = "|".join(name for dtype, name in _KINDS.items() if dtype != problem.task.dtype)
    found = [_file(path, "cpp") for path in [*files, *sorted(folder.glob("*.h"))]]
    for library in build._LOADED.values():
        path = Path(getattr(library, "_name", ""))
        if path.name and any(path.parent.name.startswith(f"{file.stem}-") for file in files):
            found.append(disassembly.library(path, other_than=rf"<[^>]*\b({others})\b"))
    return found


def _file(path: Path, language: str) -> Stage:
    """A source file as it stands."""
    text = path.read_text(encoding="utf-8")
    name = short(str(path))
    lines = {number: f"{name}:{number}" for number in range(1, len(text.splitlines()) + 1)}
    return Stage(stage="source", language=language, part=path.name, text=text, lines=lines)


@contextlib.contextmanager
def _native(problem: Problem, kernels: list[Kernel], used: Mapping[int, int]) -> Iterator[None]:
    """Native kernels are called past PyTorch's dispatcher; their launch functions tell what they are given."""
    module = _module(problem, "cpu")
    name = "launch" if problem.op == "rope" else "_run"
    launch = getattr(module, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        if problem.op == "rope":
            read, written = [*args[0], *(x for x in args[2:] if isinstance(x, Tensor))], list(args[1])
        else:
            read = [args[0], args[1], kwargs.get("dy")]
            written = [kwargs.get(key) for key in ("y", "du", "dg", "sums")]
        kernels.append(
            Kernel(
                name=f"{FOLDERS[problem.op]} (native)",
                read=_bytes(read, used),
                written=_bytes(written, used),
                note=", ".join(aten.brief(x) for x in read if x is not None),
            )
        )
        return launch(*args, **kwargs)

    with mock.patch.object(module, name, record):
        yield


def _bytes(tensors: list[Tensor | None], used: Mapping[int, int]) -> int:
    return sum(min(extent(x), used.get(x.data_ptr(), 2**63)) for x in tensors if x is not None)
