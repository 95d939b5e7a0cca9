"""fusewise's own implementations: what each call launches, and its code from source to machine instructions."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusewise
from fusewise._shared import build, host
from fusewise._shared.cuda import PARTS
from fusewise._shared.gpu import processors_of
from fusewise.ops._choice import Choice
from fusewise.ops.gated_linear import _onednn, _products
from fusewise.ops.gated_linear._cuda import in_tf32, tiles

from ..ledger import Kernel, Product, extent, product
from ..plugin import Missing, Run, Unsupported
from ..problem import Problem
from . import aten, disassembly, passes, pytorch, triton_kernels
from .stage import Stage, short

FOLDERS = {
    "rope": "rope", "geglu": "gated_linear", "gated_mlp": "gated_linear", "qk_norm_rope": "qk_norm_rope",
    "rope_and_cache": "rope_and_cache",
}  # fmt: skip
#: Names of the dtypes in the mangled names of native functions.
_KINDS = {"fp32": "float", "bf16": "Bf16", "fp16": "Fp16"}


def stages(problem: Problem, run: Run, impl: str, target: str) -> list[Stage]:
    """The stages of `impl` for a problem."""
    if impl == "reference":
        return [pytorch.operators(problem, run, within="fusewise").stage()]
    if impl == "cpu":
        return cpu_stages(problem, run)
    only = getattr(_module(problem, impl), "CAPABILITY", None)
    if only is not None and triton_kernels.capability(target) != 10 * only[0] + only[1]:
        raise Unsupported(f"its kernels are for sm_{only[0]}{only[1]}, not for {target}")
    if impl in ("triton", "gluon"):
        return triton_stages(problem, run, impl, target)
    if impl == "cuda":
        return cuda_stages(problem, target)
    raise Unsupported(f"impl {impl!r} does not show its code")


def traffic(problem: Problem, run: Run, impl: str, target: str) -> list[Kernel]:
    """The kernels that `impl` launches for a problem, and the torch operators around them."""
    seen = aten.Operators(within="fusewise", used=used(problem))
    before, step = passes.steps(problem, run)

    def charge(launch: triton_kernels.Launch) -> None:
        kernel = triton_kernels.kernel(launch, used(problem))
        seen.kernels.append(replace(kernel, product=_product_of(launch)))

    with contextlib.ExitStack() as stack:
        if impl in ("triton", "gluon"):
            stack.enter_context(_serving_any_device(problem, impl, target))
            stack.enter_context(triton_kernels.recorded(target, charge))
        elif impl in ("cpu", "cuda"):
            here = problem.device.type == impl
            if not here:
                stack.enter_context(_serving_any_device(problem, impl, target))
            stack.enter_context(_native(problem, impl, seen.kernels, here))
            if other := _otherwise(problem, impl):
                stack.enter_context(_serving_any_device(problem, other, target))
                stack.enter_context(triton_kernels.recorded(target, charge))
        elif impl != "reference":
            raise Unsupported(f"impl {impl!r} does not report its memory traffic")
        state = before()
        seen.kernels.clear()  # drop the forward before a timed backward
        with seen:
            step(state)
    return [_in_place(problem, kernel) for kernel in seen.kernels] if run.in_place else seen.kernels


def _in_place(problem: Problem, kernel: Kernel) -> Kernel:
    """A kernel that overwrites as many bytes as all outputs have, minus what it need not touch in place, such as
    features that pass through the rotation."""
    outputs = sum(math.prod(shape) for shape in problem.output_shapes()) * problem.dtype.itemsize
    if kernel.written != outputs:
        return kernel
    read, written = problem.untouched()
    return replace(kernel, read=kernel.read - read, written=kernel.written - written)


def _product_of(launch: triton_kernels.Launch) -> Product | None:
    """The product of a launch in Triton or Gluon: of x (dz) and all weights that its parameters name."""
    given = launch.arguments
    tensors = {name: triton_kernels.tensor_of(value) for name, value in given.items()}
    x = next((tensors[name] for name in ("x_map", "x_ptr", "dz_ptr") if name in tensors), None)
    named = r"(w_)?(value|gate)_(map|ptr)|w_ptr"
    weights = [w for name, w in tensors.items() if w is not None and re.fullmatch(named, name)]
    if x is None or not weights:
        return None
    if "GROUP_M" not in given:
        return product(x, *weights)
    if "BLOCK_M" in given:
        tile = given["BLOCK_M"], given["BLOCK_F"] * len(weights)
    else:
        from fusewise.ops.gated_linear import _gluon  # needs Triton

        tile = _gluon.ROWS, _gluon.columns(given["EPILOGUE"]) * len(weights)
    return _in_groups(x, weights, *tile, given["GROUP_M"], launch.grid[0])


def _product_in_cuda(given: Mapping[str, Any]) -> Product | None:
    """The product of a launch in CUDA, given its arguments."""
    x, weights = given["x"], [w for w in (given.get("value"), given.get("gate")) if w is not None]
    if not weights:
        return None
    tile = tiles.of(given["epilogue"])
    if tile is None or (x.dtype == torch.float32 and not in_tf32(x)):
        return product(x, *weights)
    at_once = processors_of(x.get_device()) // 2
    return _in_groups(x, weights, tile.rows, tile.features * len(weights), tiles.GROUP_M, at_once)


def _in_groups(x: Tensor, weights: Sequence[Tensor], rows: int, columns: int, group: int, at_once: int) -> Product:
    """A product in grouped raster order of tiles of `rows` by `columns`, `at_once` of them at a time."""
    down = min(group, -(-x.shape[0] // rows))
    return product(x, *weights, rows=group * rows, columns=max(1, at_once * columns // down))


def used(problem: Problem) -> Mapping[int, int]:
    """Tensor address -> most bytes of it that a call can need, if not all: only the rows of RoPE's table whose
    positions occur."""
    if FOLDERS[problem.op] == "gated_linear":
        return {}
    inputs, case = problem.inputs, problem.case  # type: ignore[attr-defined]
    case = getattr(case, "rope", case)
    rows = case.seqlen if inputs.positions is None else min(case.rows, case.batch * case.seqlen)
    tables = [x for x in inputs.kwargs.values() if isinstance(x, Tensor) and x.shape[:1] == inputs.cos.shape[:1]]
    return {x.data_ptr(): rows * x.stride(0) * x.element_size() for x in tables}


def _module(problem: Problem, impl: str) -> ModuleType:
    return importlib.import_module(f"fusewise.ops.{FOLDERS[problem.op]}._{impl}")


def _otherwise(problem: Problem, impl: str) -> str | None:
    """The implementation that serves what this one lacks."""
    module = _module(problem, impl)
    if hasattr(module, "otherwise"):  # it depends on the dtype
        return str(module.otherwise(problem.dtype))
    return getattr(module, "OTHERWISE", None)


@contextlib.contextmanager
def _serving_any_device(problem: Problem, impl: str, target: str) -> Iterator[None]:
    """Make the implementation accept tensors of any device, as if on `target`: they are not touched while launches are
    recorded."""
    module = _module(problem, impl)
    with contextlib.ExitStack() as stack:
        for question in sorted({"unavailable", "refuses"} & set(vars(module))):
            stack.enter_context(mock.patch.object(module, question, return_value=None))
        if hasattr(module, "_PLANS"):  # cached launches would bypass Triton's JITFunction.run
            stack.enter_context(mock.patch.object(module, "_PLANS", _Forgetful()))
        if hasattr(module, "_has_tma"):
            has_tma = triton_kernels.capability(target) >= 90
            stack.enter_context(mock.patch.object(module, "_has_tma", return_value=has_tma))
        if hasattr(module, "shared_of"):
            kib = triton_kernels.SHARED_KIB.get(triton_kernels.capability(target), 99)
            stack.enter_context(mock.patch.object(module, "shared_of", return_value=kib << 10))
        if FOLDERS[problem.op] == "gated_linear" and impl != "cpu":  # whose products differ from a CPU's
            devices = {*_products.DEVICES, problem.device.type}
            stack.enter_context(mock.patch.object(_products, "DEVICES", tuple(devices)))
            stack.enter_context(mock.patch.object(_onednn, "there", return_value=False))
        _choose_anew(problem)
        yield
    _choose_anew(problem)


class _Forgetful(dict[Any, Any]):
    """A dict that stores nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        return None


def _choose_anew(problem: Problem) -> None:
    """Clear the cached choices of implementation per kind of tensors: the operation's, and those of its parts."""
    folder = f"fusewise.ops.{FOLDERS[problem.op]}."
    for module in [module for name, module in sys.modules.items() if name.startswith(folder)]:
        for choice in vars(module).values():
            if isinstance(choice, Choice):
                for answer in vars(choice).values():
                    if hasattr(answer, "cache_clear"):
                        answer.cache_clear()


def triton_stages(problem: Problem, run: Run, impl: str, target: str) -> list[Stage]:
    """`source`, then `ttir` to `sass` of every kernel that the pass launches."""
    with _serving_any_device(problem, impl, target), triton_kernels.recorded(target) as launches:
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
    passes.once(problem, run)
    folder = Path(str(_module(problem, "cpu").__file__)).parent
    files = sorted(folder.glob("*.cpp"))
    others = "|".join(name for dtype, name in _KINDS.items() if dtype != problem.task.dtype)
    found = [_file(path, "cpp") for path in [*files, *sorted(folder.glob("*.h"))]]
    for path in build.loaded():
        if any(re.fullmatch(f"{file.stem}-[0-9a-f]+", path.parent.name) for file in files):
            found.append(disassembly.library(path, other_than=rf"<[^>]*\b({others})\b"))
    return found


def cuda_stages(problem: Problem, target: str) -> list[Stage]:
    """`source` (CUDA C++), then `ptx` and `sass` of the kernels for the problem's dtype and pairing or activation,
    compiled by the user's nvcc."""
    module = _module(problem, "cuda")
    files = module.SOURCES
    # Compile only this instance: all take five times as long, and each is independent of the others.
    if FOLDERS[problem.op] == "gated_linear":
        arch = "sm_{}{}a".format(*module.CAPABILITY)  # includes architecture-specific instructions
        # The kernels of few rows serve y alone, and are a source of their own.
        few = problem.task.pass_ == "fwd" and _width_of_stream(problem) is not None
        names = ("few_rows.cu",) if few else ("gated_linear.cu", "sideways.cu")
        only = (PARTS, *module.one(problem.dtype, problem.case.activation))  # type: ignore[attr-defined]
        if problem.task.dtype == "fp32":
            files, names = module.FLOAT32_SOURCES, ("float32.cu",)
        elif problem.task.dtype == "tf32":
            files, names = module.TF32_SOURCES, ("tf32.cu",)
        sources = [module.FOLDER / name for name in names]
    else:
        arch = f"sm_{triton_kernels.capability(target)}"
        sources = [module.SOURCES[0]]
        dtype, of, to = _instance(problem)
        only = (f"-DFUSEWISE_DTYPE={dtype}", f"-DFUSEWISE_IN={of:d}", f"-DFUSEWISE_OUT={to:d}")
    found = [_file(path, "cpp") for path in files]
    with tempfile.TemporaryDirectory(prefix="fusewise-code-") as folder:
        for source in sources:
            ptx = _nvcc(source, Path(folder, f"{source.stem}.ptx"), "-ptx", arch, *only)
            cubin = _nvcc(ptx, Path(folder, f"{source.stem}.cubin"), "-cubin", arch).read_bytes()
            parts = {name: part for name in disassembly.names(cubin) if (part := _cuda_part(problem, name))}
            found += disassembly.ptx(ptx.read_text(encoding="utf-8"), target, parts)
            found += disassembly.functions(cubin, target, parts)
    return found


def _width_of_stream(problem: Problem) -> int | None:
    """On the GPU with most SMs that the kernels serve: H100 and H200 (SXM)."""
    return tiles.width_of_stream(problem.case.rows, problem.case.hidden, 132)  # type: ignore[attr-defined]


def _nvcc(source: Path, result: Path, kind: str, arch: str, *more: str) -> Path:
    """Compile `source` with the user's nvcc and the flags of the kernels, plus line information."""
    flags = ("-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", kind, "-o", str(result))
    try:
        command = (*build.nvcc().needed(), *flags, *more, str(source))
    except build.BuildError as error:
        raise Missing(str(error)) from None
    done = subprocess.run(command, capture_output=True, text=True, timeout=build.TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed: {done.stderr.strip()[:500]}")
    return result


def _instance(problem: Problem) -> tuple[str, bool, bool]:
    """The kernels' element type, and whether pairs are interleaved where they are read and where they are written."""
    case = problem.case  # type: ignore[attr-defined]
    pairing = getattr(case, "rope", case).pairing
    dtype = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half"}[problem.task.dtype]
    return dtype, pairing.startswith("interleaved"), pairing.endswith("interleaved")


def _cuda_part(problem: Problem, name: str) -> str:
    """A short name of a kernel if it serves this problem, else empty. Kernels: `rope…<type, in, out, vector, heads>`,
    `direct_rope…<type, table, interleaved, vector, heads, at once>`, `light_rope…<type, table, in, out, bytes,
    copies>`, `bulk_rope…<type, table, bytes>`, `norm_rope_kernel<type, in, out, vector>`, `direct_heads_kernel<type,
    weight, table, interleaved, vector, heads>`, `direct_row_kernel` likewise, `gated_linear_kernel<…, epilogue, …>`,
    `few_rows_kernel<…, columns, slabs, …>`, `gate_gradient_kernel<…>`, `unit_kernel<…>`."""
    if FOLDERS[problem.op] == "gated_linear":
        for alone in ("gate_gradient_kernel", "unit_kernel"):
            if alone in name:
                return alone
        if found := re.search(r"few_rows_kernelILb\dELi(\d+)ELi(\d)E", name):
            columns, slabs = map(int, found.groups())
            width, rows = _width_of_stream(problem), problem.case.rows  # type: ignore[attr-defined]
            serves = width is not None and columns == min(n for n in tiles.STREAM_COLUMNS if rows <= n)
            return f"few_rows_kernel of {columns} columns, tiles to {64 * slabs} features" if serves else ""
        found = re.search(r"gated_linear_kernelILb\dELi(\d+)", name)
        sideways = (f"y of {each.rows} rows sideways" for each in tiles.SIDEWAYS)
        kinds = "y", "preact", "gradient", "down", *sideways, "", "", "y in tf32", "preact in tf32"
        return f"gated_linear_kernel {kinds[int(found[1])]}" if found else ""
    dtype, of, to = _instance(problem)
    inputs, case = problem.inputs, problem.case  # type: ignore[attr-defined]
    case = getattr(case, "rope", case)
    tables = (table.dtype for key in ("cos", "cos_sin") if (table := inputs.kwargs.get(key)) is not None)
    kind = "f" if dtype == "float" else f"{len(dtype)}{dtype}"
    table = "f" if any(dtype.itemsize == 4 for dtype in tables) else r"S\w?_"  # float32, else the tensors' own dtype
    widest = _widest(problem)
    if found := re.search(rf"\d(rope(?:_and_cache)?_kernel)I{kind}Lb{of:d}ELb{to:d}ELi{widest}ELi(\d+)E", name):
        return f"{found[1]} {widest} wide, {found[2]} heads"
    if found := re.search(rf"\ddirect_rope_and_cache_kernelI{kind}{table}Lb{of:d}ELi(\d+)ELi(\d+)ELi(\d+)E", name):
        wide, heads, at_once = map(int, found.groups())
        if wide not in {widest, max(widest // 2, 2)}:  # half as wide for a few tokens
            return ""
        return f"direct_rope_and_cache_kernel {wide} wide, {heads} heads, {at_once} at once"
    if problem.op == "qk_norm_rope":
        weight = "f" if dtype == "float" else r"S\w?_"  # the weights' dtype is that of q
        rows = "row" if problem.case.norm == "all" else "heads"  # type: ignore[attr-defined]
        form = rf"I{kind}{weight}{table}Lb{of:d}ELi(\d+)ELi(\d+)E"
        found = re.search(rf"\d(direct_{rows}_kernel){form}|(norm_rope_kernel)I{kind}Lb{of:d}ELb{to:d}ELi(\d+)E", name)
        if found is None:
            return ""
        if int(found[2] or found[5]) not in {widest, max(widest // 2, 2)}:  # half as wide for a few tokens
            return ""
        return f"{found[1]} {found[2]} wide, {found[3]} heads" if found[1] else f"{found[4]} {found[5]} wide"
    if found := re.search(rf"\dlight_rope_kernelI{kind}{table}Lb{of:d}ELb{to:d}ELi(\d+)ELb(\d)E", name):
        size, copies = int(found[1]), found[2] == "1"
        serves = size == widest * problem.dtype.itemsize * (2 if of or to else 1)
        part = case.rotated < case.head_dim
        return f"light_rope_kernel of {size} bytes{', copies' * copies}" if serves and copies <= part else ""
    if found := re.search(rf"\dbulk_rope_kernelI{kind}{table}Li(\d+)E", name):
        size = int(found[1])
        serves = size == widest * problem.dtype.itemsize and case.rotated < case.head_dim and not (of or to)
        return f"bulk_rope_kernel of {size} bytes" if serves else ""
    return ""


def _widest(problem: Problem) -> int:
    """Pairs per thread and vector access: 16 bytes, or less if the widths and strides of q and k require it, as in
    `launch.cuh`."""
    case, xs = problem.case, problem.inputs.operands  # type: ignore[attr-defined]
    rotated, size = getattr(case, "rope", case).rotated, problem.dtype.itemsize
    _, of, to = _instance(problem)
    lengths = [rotated * size // (1 if of or to else 2)]
    for x in xs:
        steps = [step for step, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]
        lengths += [x.data_ptr(), *(size * n for n in (*steps, x.shape[-1] - rotated))]
    return max(1, math.gcd(16, *lengths) // size // (2 if of or to else 1))


def _file(path: Path, language: str) -> Stage:
    """A source file, unchanged."""
    text = path.read_text(encoding="utf-8")
    name = short(str(path))
    lines = {number: f"{name}:{number}" for number in range(1, len(text.splitlines()) + 1)}
    return Stage(stage="source", language=language, part=path.name, text=text, lines=lines)


@contextlib.contextmanager
def _native(problem: Problem, impl: str, kernels: list[Kernel], here: bool) -> Iterator[None]:
    """Record the arguments of native launch functions, which are called outside PyTorch's dispatcher. `here`: also run
    them."""
    module = _module(problem, impl)
    name = {"gated_linear": "_run", "qk_norm_rope": "forward"}.get(FOLDERS[problem.op], "launch")
    launch = getattr(module, name)
    most = used(problem)

    def record(*args: Any, **kwargs: Any) -> Any:
        multiplied: Product | None = None
        if problem.op == "rope":
            xs, ys, rotation = args
            read, written = [*xs, *(x for x in rotation if isinstance(x, Tensor))], list(ys)
        elif problem.op == "rope_and_cache":
            q, k, v, *caches = args[:5]
            read, written = [q, k, v, *(x for x in args[5:] if isinstance(x, Tensor))], [q, k, *caches]
        elif problem.op == "qk_norm_rope":
            xs, ys, weights, rotation, _ = args
            read, written = [*xs, *weights, *(x for x in rotation if isinstance(x, Tensor))], list(ys)
        elif impl == "cuda":
            given = inspect.signature(launch).bind(*args, **kwargs).arguments
            read = [given["x"], given.get("value"), given.get("gate"), *given.get("bias", ()), *given.get("inputs", ())]
            written = [given.get("y"), *given.get("outputs", ()), given.get("dbias")]
            multiplied = _product_in_cuda(given)
        else:
            read = [args[0], args[1], kwargs.get("dy")]
            written = [kwargs.get(key) for key in ("y", "du", "dg", "sums")]
        kernels.append(
            Kernel(
                name=f"{FOLDERS[problem.op]} ({impl})",
                read=_bytes(read, most),
                written=_bytes(written, most),
                note=", ".join(aten.brief(x) for x in read if x is not None),
                product=multiplied,
            )
        )
        return launch(*args, **kwargs) if here else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, name, record))
        stack.enter_context(host.through_python())  # the fast path bypasses the launch function
        yield


def _bytes(tensors: list[Tensor | None], used: Mapping[int, int]) -> int:
    return sum(min(extent(x), used.get(x.data_ptr(), 2**63)) for x in tensors if x is not None)
