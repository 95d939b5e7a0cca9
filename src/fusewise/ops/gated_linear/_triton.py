"""`impl="triton"` of the gated linear unit: configurations, arguments and launch of the GEMM kernels in `_triton_kernel.py`.

Elementwise kernels are launched by `_triton_gate.py`. float32 products go to the platform's BLAS, with the gate as a separate
kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._shared.gpu import processors_of
from ..._shared.triton_launch import INTERPRETED, launch
from ..._shared.triton_launch import unavailable as unavailable
from .._tuned import Key, Tuned
from . import _chunks as chunks
from ._gate_config import gate_key
from ._problem import (
    Halves,
    Preact,
    Spec,
    add_up,
    describable,
    new_preact,
    new_sums,
    no_rows,
    odd,
    split_preact,
    stride_unit,
)
from ._products import COLUMN_MULTIPLE, ROWS, aligned, aligned_buffer, copy_to, padded, pads, product
from ._triton_gate import choose_gate, gate, gate_configurations, start_gradient
from ._triton_gate import copy_into as copy_into  # of the interface
from ._triton_gate import gate_gradient_into as gate_gradient_into
from ._triton_kernel import down_gradient_kernel, gated_linear_kernel

SHARED = 227 << 10  # bytes of shared memory that a program may have on Hopper
FEWEST_STAGES = 3  # with fewer, loads would not overlap the matmul: rather a smaller tile


@dataclass(frozen=True)
class Config:
    """Tile of a program: block_m rows by block_f columns of each half, block_d features per pipeline stage."""

    block_m: int
    block_f: int
    block_d: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split: bool = False  # the epilogue in two halves


def _streaming(rows: int, block_f: int, block_d: int, num_stages: int) -> Config:
    return Config(rows, block_f, block_d, 4, num_stages, group_m=1)


#: Tiles of up to 64 rows by their rows, preferred first, each with how many of its programs an SM of Hopper runs at a time.
_FEW_ROWS = {
    16: ((_streaming(16, 32, 256, 3), 2), (_streaming(16, 32, 128, 3), 5), (_streaming(16, 64, 128, 3), 3)),
    32: ((_streaming(32, 16, 128, 3), 4), (_streaming(32, 64, 128, 3), 2), (_streaming(32, 16, 256, 3), 3)),
    64: ((_streaming(64, 16, 128, 3), 3), (_streaming(64, 32, 128, 3), 2), (_streaming(64, 32, 64, 3), 4)),
}  # fmt: skip
#: The same for the gradient through the down projection, which reads one weight, `block_f` elements at a time. Some run in
#: larger numbers than these, but then take more time than the next.
_FEW_ROWS_DOWN = {
    16: ((_streaming(16, 32, 256, 3), 2), (_streaming(16, 32, 64, 4), 3), (_streaming(16, 64, 64, 4), 6)),
    32: ((_streaming(32, 32, 256, 3), 2), (_streaming(32, 32, 64, 4), 3), (_streaming(32, 64, 64, 4), 5)),
    64: ((_streaming(64, 32, 64, 5), 3), (_streaming(64, 32, 64, 4), 4), (_streaming(64, 32, 64, 3), 5)),
}  # fmt: skip


def shared_bytes(config: Config, *, epilogue: str, tma: bool) -> int:
    """Shared memory of a program, from what Triton allocates: a buffer per stage but one, and with TMA a tile of the output,
    barriers and their alignment. Hopper's matmuls may need one buffer more, for which its limit has room."""
    loaded = config.block_m + (1 if epilogue == "down" else 2) * config.block_f
    stored = config.block_m * config.block_f // (2 if config.split else 1) * 2 + 1024 if tma else 0
    return (config.num_stages - 1) * loaded * config.block_d * 2 + stored


@functools.cache
def shared_of(device: int) -> int:
    """Bytes of shared memory that a program may have on the GPU with this index; an H200's if there is none (-1)."""
    if device < 0:
        return SHARED
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def _for_few_rows(rows: int, hidden: int, processors: int, shared: int, *, epilogue: str, tma: bool) -> Config:
    """Up to 64 rows, reading the weight dominates, at full rate as long as every SM has programs. So the first tile of
    which all programs run at once; else the one whose last programs keep the most SMs busy."""
    tiles = (_FEW_ROWS_DOWN if epilogue == "down" else _FEW_ROWS)[max(16, triton.next_power_of_2(rows))]
    known = [(config, n) for config, n in tiles if shared_bytes(config, epilogue=epilogue, tma=tma) <= shared]
    for config, resident in known:
        if triton.cdiv(hidden, config.block_f) <= resident * processors:
            return config

    def cost(config: Config, resident: int) -> float:
        """Time in features: too few last programs, of less than 32 features per SM, take as long as those would; x comes
        from L2 and hardly counts."""
        last = triton.cdiv(hidden, config.block_f) % (resident * processors) * config.block_f
        return float((hidden + max(0, 32 * processors - last)) * (1 + 0.01 * config.block_m / config.block_f))

    return min(known, key=lambda each: cost(*each))[0]


@functools.lru_cache(maxsize=4096)
def choose(rows: int, hidden: int, processors: int, shared: int = SHARED, *, epilogue: str, tma: bool = True) -> Config:
    """Heuristic configuration of the GEMM kernels for a shape and device: up to 64 rows see `_for_few_rows`; above, the tile
    with the least estimated time (see `_waves`), with as many stages as fit into `shared` bytes."""
    if rows <= 64:
        return _for_few_rows(rows, hidden, processors, shared, epilogue=epilogue, tma=tma)
    candidates = [Config(128, 64, 64, 8, 4), Config(64, 64, 64, 4, 4)]
    if tma:
        candidates.append(Config(128, 128, 64, 8, 4 if epilogue == "y" else 3, split=True))
    elif epilogue in ("y", "preact"):  # the other epilogues would spill registers for addresses
        candidates.append(Config(128, 128, 64, 8, 3))
    fitting = [
        replace(config, num_stages=stages)
        for config in candidates
        for stages in range(config.num_stages, FEWEST_STAGES - 1, -1)
        if shared_bytes(replace(config, num_stages=stages), epilogue=epilogue, tma=tma) <= shared
    ]
    return min(fitting, key=lambda c: _waves(c, rows, hidden, processors))  # of equal ones the first, with most stages


def _waves(config: Config, rows: int, hidden: int, processors: int) -> float:
    """Estimated time of the busiest SM in multiply-adds over its tiles; smaller tiles read more per multiply-add."""
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(hidden, config.block_f)
    reads = 1 / config.block_m + 1 / (2 * config.block_f)
    return float(triton.cdiv(tiles, processors) * config.block_m * config.block_f * (1 + 32 * reads))


def configurations(
    rows: int, hidden: int, processors: int, shared: int = SHARED, *, epilogue: str, tma: bool
) -> list[Config]:
    """Search space of `fusewise tune` for a GEMM kernel, the heuristic's choice first."""
    chosen = choose(rows, hidden, processors, shared, epilogue=epilogue, tma=tma)
    if rows <= 64:
        others = [
            Config(chosen.block_m, f, d, 4, s, group_m=1)
            for f, d, s in itertools.product((16, 32, 64), (64, 128, 256), (2, 3, 4, 5))
        ]
    else:
        tiles = itertools.product(
            ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (256, 64, 8)), (3, 4), (4, 8, 16)
        )
        others = [Config(m, f, 64, w, s, g, split=tma and f == 128) for (m, f, w), s, g in tiles]

    def fits(config: Config) -> bool:  # with the buffer more that Hopper may need
        return shared_bytes(replace(config, num_stages=config.num_stages + 1), epilogue=epilogue, tma=tma) <= shared

    return list(dict.fromkeys([chosen, *filter(fits, others)]))


def _space(key: Key, device: int) -> list[Any]:
    if key.kernel == "gate":
        return gate_configurations(key.rows, key.hidden, processors_of(device), sums=key.way == "sums")
    known = key.kernel in ("y", "preact", "gradient", "down") and key.way in ("tma", "pointers")
    if not known or key.dtype == torch.float32:  # whose products are the library's
        return []
    tma = key.way == "tma"
    return configurations(key.rows, key.hidden, processors_of(device), shared_of(device), epilogue=key.kernel, tma=tma)


TUNED: Tuned[Any] = Tuned(
    "gated_linear",
    "triton",
    [Path(__file__).with_name(f"{name}.py") for name in ("_triton", "_triton_gate", "_triton_kernel", "_gate_config")],
    _space,
)


@functools.cache
def _has_tma(device: int) -> bool:
    return device < 0 or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def path(x: Tensor, halves: Halves) -> str:
    """For `explain_dispatch`: how a call's products move their matrices, why, and which configurations are tuned."""
    hidden = halves.value.shape[0]
    gradient_key = gate_key(x.dtype, x.shape[0], hidden, halves.value_bias is not None)
    if by_library(x):
        moved, keys = "float32 matmuls by the platform's library, followed by the gate", [gradient_key]
    else:
        moved = _moved(x, halves)
        keys = [*(product_key(e, x, hidden, "by TMA" in moved) for e in ("y", "preact", "gradient")), gradient_key]
    tuned = TUNED.explain(x.get_device(), keys)
    return f"{moved}; {tuned}" if tuned else moved


def _moved(x: Tensor, halves: Halves) -> str:
    operands = {"x": x, "the value's weight": halves.value, "the gate's weight": halves.gate}
    unaligned = [name for name, matrix in operands.items() if not describable(matrix)]
    copies = f"copies of {' and '.join(unaligned)}, " if unaligned and _copies(x) else ""
    if not _has_tma(x.get_device()):
        return f"{copies}through pointers: the device has no TMA"
    lacking = [] if copies else unaligned
    if (hidden := halves.value.shape[0]) * x.element_size() % 16:
        lacking.append(f"y (F = {hidden})")
    needs = "TMA needs starts and rows aligned to 16 bytes"
    if lacking:
        return f"{copies}through pointers: {needs}, which {' and '.join(lacking)} lacks"
    return f"{copies}by TMA: {needs if copies else 'all starts and rows are aligned to 16 bytes'}"


def _copies(x: Tensor) -> bool:
    """Whether operands that TMA does not support are copied: with fewer rows, reading the weight dominates."""
    return x.shape[0] >= ROWS


def _programs(config: Config, rows: int, hidden: int, processors: int) -> tuple[int, tuple[int, int]]:
    """Grid size of a GEMM kernel, and the block that its epilogue processes at a time."""
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(hidden, config.block_f)
    grid = min(tiles, processors) if config.block_m > 64 else tiles
    return grid, (config.block_m, config.block_f // 2 if config.split else config.block_f)


def _matrices(tma: bool) -> Callable[[Tensor, tuple[int, int]], Any]:
    """How a matrix is passed to a kernel: as a TMA descriptor with a block shape, or as a pointer."""
    return (
        (lambda t, block: TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))) if tma else lambda t, _: t
    )


def linear_arguments(
    x: Tensor, halves: Halves, config: Config, processors: int, *, epilogue: str, activation: str, tma: bool,
    y: Tensor | None, preact: tuple[Tensor, Tensor] | None, dy: Tensor | None, dbias: Tensor | None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Grid size and all arguments of `gated_linear_kernel`. x stands in for tensors that the epilogue does not use,
    which are never dereferenced."""
    rows, features = x.shape
    hidden = halves.value.shape[0]
    grid, out = _programs(config, rows, hidden, processors)
    matrix = _matrices(tma)

    def optional(t: Tensor | None) -> Any:
        return x if t is None else matrix(t, out)

    def stride(t: Tensor | None) -> int:
        return 0 if t is None else t.stride(0) // step

    u, g = (None, None) if preact is None else preact
    bias = halves.value_bias is not None and halves.gate_bias is not None
    matrices = [t for t in (x, halves.value, halves.gate, y, u, g, dy) if t is not None]
    step = 1 if tma else stride_unit(*matrices)
    return grid, {
        "x_ptr": matrix(x, (config.block_m, config.block_d)),
        "w_value_ptr": matrix(halves.value, (config.block_f, config.block_d)),
        "w_gate_ptr": matrix(halves.gate, (config.block_f, config.block_d)),
        "b_value_ptr": halves.value_bias if bias else x, "b_gate_ptr": halves.gate_bias if bias else x,
        "y_ptr": optional(y), "u_ptr": optional(u), "g_ptr": optional(g), "dy_ptr": optional(dy),
        "dbias_ptr": x if dbias is None else dbias,
        "M": rows, "F": hidden // step, "D": features // step, "stride_x": x.stride(0) // step,
        "stride_w_value": halves.value.stride(0) // step, "stride_w_gate": halves.gate.stride(0) // step,
        "stride_b_value": 0 if halves.value_bias is None else halves.value_bias.stride(0),
        "stride_b_gate": 0 if halves.gate_bias is None else halves.gate_bias.stride(0), "stride_y": stride(y),
        "stride_preact": stride(u), "stride_dy": stride(dy), "programs": grid,
        "EPILOGUE": epilogue, "ACTIVATION": activation, "HAS_BIAS": bias, "BIAS_GRAD": dbias is not None,
        "BLOCK_M": config.block_m, "BLOCK_F": config.block_f, "BLOCK_D": config.block_d, "GROUP_M": config.group_m, "SPLIT": config.split,
        "EVEN_D": features % config.block_d == 0, "TMA": tma,
        "UPCAST": INTERPRETED and x.dtype == torch.bfloat16, "UNIT": step,
    }  # fmt: skip


def _start(kernel: Any, grid: int, config: Config, arguments: dict[str, Any], device: int) -> None:
    launch(kernel, grid, arguments, device, num_warps=config.num_warps, num_stages=config.num_stages)


def product_key(epilogue: str, x: Tensor, hidden: int, tma: bool) -> Key:
    """Lookup key of a tuned configuration of a GEMM kernel; x (rows, inner)."""
    return Key(epilogue, x.dtype, "tma" if tma else "pointers", x.shape[0], x.shape[1], hidden)


def _configure(epilogue: str, x: Tensor, hidden: int, tma: bool) -> Config:
    device = x.get_device()
    found: Config | None = TUNED.find(device, product_key(epilogue, x, hidden, tma))
    return found or choose(x.shape[0], hidden, processors_of(device), shared_of(device), epilogue=epilogue, tma=tma)


def _linear(
    x: Tensor, halves: Halves, spec: Spec, epilogue: str, *, y: Tensor | None = None, preact: Preact | None = None,
    dy: Tensor | None = None, dbias: Tensor | None = None,
) -> None:  # fmt: skip
    if x.shape[0] == 0:
        return no_rows(dbias)
    device = x.get_device()
    processors = processors_of(device)
    if _copies(x):
        x, halves = aligned(x), halves._replace(value=aligned(halves.value), gate=aligned(halves.gate))
    parts = None if preact is None else split_preact(preact, spec)
    matrices = [t for t in (x, halves.value, halves.gate, y, *(parts or ()), dy) if t is not None]
    tma = _has_tma(device) and all(map(describable, matrices))
    config = _configure(epilogue, x, halves.value.shape[0], tma)
    sums = new_sums(dbias, triton.cdiv(x.shape[0], config.block_m))
    grid, arguments = linear_arguments(
        x, halves, config, processors, epilogue=epilogue, activation=spec.activation, tma=tma, y=y, preact=parts, dy=dy,
        dbias=sums,
    )  # fmt: skip
    _start(gated_linear_kernel, grid, config, arguments, device)
    add_up(sums, dbias)


def by_library(x: Tensor) -> bool:
    """Whether BLAS computes the products: in float32. Without tensor cores the fused kernel took 3.6 times as long on an H200,
    7 times with a single row; in tf32, for which they are, Triton cuts off the bits that the library rounds."""
    return x.dtype == torch.float32


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    """`impl="triton"`: this and the gradients as in `reference.py`."""
    if by_library(x):
        u, g = _by_library(x, halves, spec, preact)
        return gate(u, g, y, spec.activation)
    _linear(x, halves, spec, "y" if preact is None else "preact", y=y, preact=preact)


def _by_library(x: Tensor, halves: Halves, spec: Spec, preact: Preact | None) -> tuple[Tensor, Tensor]:
    """u and g, in `preact` if it is given: whole, since each product leaves part of the GPU idle at its end."""
    hidden = halves.value.shape[0]
    parts = () if preact is None else split_preact(preact, spec)
    if not pads(x) or not odd(hidden, (x, halves.value, halves.gate, *parts)):
        preact = new_preact(x, hidden, spec) if preact is None else preact
        chunks.products(x, halves, spec, preact)
        return split_preact(preact, spec)
    x = padded(x)
    features, outputs = x.shape[1], hidden + -hidden % COLUMN_MULTIPLE
    found = []
    for i, (weight, bias) in enumerate(((halves.value, halves.value_bias), (halves.gate, halves.gate_bias))):
        part = torch.mm(x, copy_to(weight, aligned_buffer(x, outputs, features)).mT)[:, :hidden]
        if bias is not None:
            part.add_(bias)
        found.append(part if preact is None else parts[i].copy_(part))
        del part  # else it would still be there beside the next one
    return found[0], found[1]


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Preact, spec: Spec, dbias: Tensor | None
) -> None:
    if by_library(x):
        _by_library(x, halves, spec, dpreact)
        return gradient(dy, dpreact, dpreact, spec, dbias)
    _linear(x, halves, spec, "gradient", preact=dpreact, dy=dy, dbias=dbias)


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    rows, hidden = dy.shape
    device = dy.get_device()
    key = gate_key(dy.dtype, rows, hidden, dbias is not None)
    config = TUNED.find(device, key) or choose_gate(rows, hidden, processors_of(device), sums=dbias is not None)
    sums = new_sums(dbias, triton.cdiv(rows, config.rows))
    before, after = split_preact(preact, spec), split_preact(dpreact, spec)
    start_gradient(dy, before, after, config, spec.activation, sums)
    add_up(sums, dbias)


def down_arguments(
    dz: Tensor, w_down: Tensor, preact: tuple[Tensor, Tensor], y: Tensor, dpreact: tuple[Tensor, Tensor], config: Config,
    processors: int, *, activation: str, tma: bool, dbias: Tensor | None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Grid size and all arguments of `down_gradient_kernel`."""
    rows, outputs = dz.shape
    hidden = w_down.shape[1]
    grid, out = _programs(config, rows, hidden, processors)
    matrix = _matrices(tma)
    step = 1 if tma else stride_unit(dz, w_down, *preact, y, *dpreact)
    return grid, {
        "dz_ptr": matrix(dz, (config.block_m, config.block_d)), "w_ptr": matrix(w_down, (config.block_d, config.block_f)),
        "u_ptr": matrix(preact[0], out), "g_ptr": matrix(preact[1], out), "y_ptr": matrix(y, out),
        "du_ptr": matrix(dpreact[0], out), "dg_ptr": matrix(dpreact[1], out), "dbias_ptr": dz if dbias is None else dbias,
        "M": rows, "F": hidden // step, "OUT": outputs // step, "stride_dz": dz.stride(0) // step,
        "stride_w": w_down.stride(0) // step, "stride_preact": preact[0].stride(0) // step,
        "stride_y": y.stride(0) // step, "stride_dpreact": dpreact[0].stride(0) // step,
        "programs": grid, "ACTIVATION": activation, "BIAS_GRAD": dbias is not None,
        "BLOCK_M": config.block_m, "BLOCK_F": config.block_f, "BLOCK_O": config.block_d, "GROUP_M": config.group_m, "SPLIT": config.split,
        "EVEN_OUT": outputs % config.block_d == 0, "TMA": tma,
        "UPCAST": INTERPRETED and dz.dtype == torch.bfloat16, "UNIT": step,
    }  # fmt: skip


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    if dz.shape[0] == 0:
        return no_rows(dbias)
    if by_library(dz):
        parts = list(chunks.slices(y.shape[0], chunks.gpu_rows_of(y.shape[0])))  # dy of one at a time
        sums = new_sums(dbias, len(parts))
        for i, chunk in enumerate(parts):
            dy = product(dz[chunk], w_down)[:, : y.shape[1]]
            before, after = chunks.part_of(preact, chunk, spec), chunks.part_of(dpreact, chunk, spec)
            gate(*split_preact(before, spec), y[chunk], spec.activation)
            gradient(dy, before, after, spec, None if sums is None else sums[i])
            del dy  # else it would still be there beside the next one
        return add_up(sums, dbias)
    device = dz.get_device()
    processors = processors_of(device)
    before, after = split_preact(preact, spec), split_preact(dpreact, spec)
    tma = _has_tma(device) and all(map(describable, (dz, w_down, *before, y, *after)))
    config = _configure("down", dz, w_down.shape[1], tma)
    sums = new_sums(dbias, triton.cdiv(dz.shape[0], config.block_m))
    grid, arguments = down_arguments(
        dz, w_down, before, y, after, config, processors, activation=spec.activation, tma=tma, dbias=sums,
    )  # fmt: skip
    _start(down_gradient_kernel, grid, config, arguments, device)
    add_up(sums, dbias)
