"""`impl="cuda"` of the gated linear unit, for Hopper: the kernels in `gated_linear.cu` and, for float32, in `float32.cu` or, where
matmuls may round to tf32, `tf32.cu`, compiled on first use with the user's nvcc for the dtype and the activation of a call, and
their launcher.

The interface is complete; calls of a function for which `lacks` is true are left to the implementation named by `otherwise`.

The libraries do not depend on torch: they receive addresses and a stream, so one build works with every torch version.
"""

from __future__ import annotations

import functools
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from ...._shared import build, cuda
from ...._shared.gpu import processors_of, tf32_allowed
from ..._tuned import Key, Tuned
from .. import _host
from .._problem import ACTIVATIONS, ALIGNED, Halves, Preact, Spec, describable, new_sums, no_rows, odd, split_preact
from .._products import COLUMN_MULTIPLE, aligned, aligned_output, copy_to, each
from . import float32, tiles
from .tiles import DOWN, FEW, GATE, GRADIENT, PREACT, TF32_PREACT, TF32_Y, Y

FOLDER = Path(__file__).parent
_PRODUCTS = (
    *(FOLDER / name for name in (
        "epilogues.cuh", "gate.cuh", "hopper.cuh", "instructions.cuh", "launch.cuh", "matrices.cuh", "plan.h",
        "products.cuh", "sums.cuh", "tiles.cuh", "wgmma.cuh",
    )),
    cuda.MBARRIER,
)  # fmt: skip
_HALF = "gated_linear.cu", "sideways.cu", "few_rows.cu", "few_rows.cuh", "gate_gradient.cuh"
SOURCES = (*(FOLDER / name for name in _HALF), *_PRODUCTS)
TF32_SOURCES = (FOLDER / "tf32.cu", *_PRODUCTS)
FLOAT32_SOURCES = tuple(
    FOLDER / name for name in ("float32.cu", "copies.cuh", "gate.cuh", "instructions.cuh", "plan.h")
)
CAPABILITY = cuda.HOPPER
HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)
#: What a library is compiled for, besides an activation: a dtype, and whether its products are in tf32.
KINDS = (*((dtype, False) for dtype in DTYPES), (torch.float32, True))
OTHERWISE = "gluon"  # in 16 bits; `otherwise` is for every dtype
#: Functions of products that gluon serves in less time at some sizes: their kernels as in `tiles.RACES`, and names for users.
SHARED = {
    "forward": ("preact", "pre-activations"),
    "recompute_gradient": ("gradient", "gradients with recomputing"),
    "down_gradient": ("down", "gradients behind a down projection"),
}
#: Rows from which its tiles pay off where gradients are computed by a product, and copies of matrices that TMA does not support.
TILES_FROM = 129
#: Maximum rows and features: kernels count them in 32 bits, up to the end of a tile.
MOST = (1 << 31) - 256
ROWS, GATE_ROWS = 128, 32  # rows of a tile; minimum rows of a partial sum without a product, as in plan.h

_PLAN = Struct("17q")
_CALL = Struct("12q")


def recipe(dtype: torch.dtype, activation: str, tf32: bool = False) -> build.Recipe:
    """Build recipe of the library for a dtype and an activation; of float32, for products in tf32 or not."""
    flags, only = cuda.flags((CAPABILITY,), "a"), one(dtype, activation)
    if tf32:
        return "gated-linear-tf32-cuda", TF32_SOURCES, build.nvcc(), (*flags, *only)
    if dtype == torch.float32:
        return "gated-linear-float32-cuda", FLOAT32_SOURCES, build.nvcc(), (*flags, *only)
    return "gated-linear-cuda", SOURCES, build.nvcc(), (*flags, cuda.PARTS, *only)


def one(dtype: torch.dtype, activation: str) -> tuple[str, ...]:
    """nvcc flags that compile the kernels for a single dtype and activation."""
    return f"-DFUSEWISE_BFLOAT16={dtype == torch.bfloat16:d}", f"-DFUSEWISE_ACTIVATION={activation.upper()}"


@functools.cache
def _kernel(dtype: torch.dtype, activation: str, tf32: bool = False) -> cuda.Library | str:
    """The library, built if necessary, or why there is none."""
    name = "tf32" if tf32 else "float32" if dtype == torch.float32 else "linear"
    try:
        library = cuda.Library(recipe(dtype, activation, tf32), f"fusewise_gated_{name}")
    except build.BuildError as error:
        return str(error)
    _host.unavailable()  # loads it once it is built, so that it takes the next call
    return library


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernels cannot serve tensors of this device type, or None if they can; builds nothing."""
    if (reason := cuda.no_gpu(device_type) or cuda.not_hopper("cuda")) is not None:
        return reason
    missing = build.nvcc().missing
    there = missing and any(
        build.built(*recipe(dtype, activation, tf32)) for dtype, tf32 in KINDS for activation in ACTIVATIONS
    )
    return missing if missing and not there else None


def refuses(hidden: int, matrices: tuple[Tensor, ...], activation: str, kernel: str, *, by_choice: bool) -> str | None:
    """Why a call of a kernel (as in `tiles.py`, or "gate") with these matrices, x first, and F = `hidden` is left to another
    implementation, or None if it is not. Builds the library for the activation if necessary."""
    x = matrices[0]
    rows = x.shape[0]
    if max(hidden, *x.shape) > MOST:
        return f"rows and features must be at most {MOST}"
    if x.dtype == torch.float32:
        if (reason := float32.refuses(hidden, matrices, by_choice=by_choice, kernel=kernel)) is not None:
            return reason
    elif by_choice and rows < TILES_FROM:
        if kernel in ("gradient", "down"):
            return f"in a product for gradients, up to {TILES_FROM - 1} rows are too few for its tiles"
        if odd(hidden, matrices):
            return f"{ALIGNED}, and copying others pays off only from {TILES_FROM} rows on"
    if x.dtype != torch.float32 and by_choice and kernel == "y" and _config("y", x, hidden).tiles == "gluon":
        return "gluon's tiles of 128 rows by 64 features take less time at this size"
    library = _kernel(x.dtype, activation, in_tf32(x))
    return library if isinstance(library, str) else None


def in_tf32(x: Tensor) -> bool:
    """Whether products with x may round their operands to tf32."""
    return x.dtype == torch.float32 and tf32_allowed()


def _config(kernel: str, x: Tensor, hidden: int, *, or_gluon: bool = True) -> tiles.Config:
    """What computes a kernel, as tuned on this machine or by the heuristic."""
    key, device = _key(kernel, x, hidden), x.get_device()
    found = CHOICE.find(device, key)
    if found is not None and (or_gluon or found.tiles != "gluon"):
        return found
    return tiles.choose(*_size(key, device), gluon=or_gluon and _with_gluon(key))


def _key(kernel: str, x: Tensor, hidden: int) -> Key:
    return Key(kernel, x.dtype, "", x.shape[0], x.shape[1], hidden)


def _size(key: Key, device: int) -> tuple[str, int, int, int, int]:
    return key.kernel, key.rows, key.inner, key.hidden, processors_of(device)


def _with_gluon(key: Key) -> bool:
    """Whether Gluon's tiles are among those to choose from."""
    return key.rows >= TILES_FROM and _gluon_is_there()


def _space(key: Key, device: int) -> list[tiles.Config]:
    if key.kernel not in tiles.RACES or key.dtype not in HALF:
        return []
    return tiles.configurations(*_size(key, device), gluon=_with_gluon(key))


#: Looked up by the dispatch of a call; an implementation's TUNED is looked up by its launches.
CHOICE: Tuned[tiles.Config] = Tuned("gated_linear", "cuda", (*SOURCES, FOLDER / "tiles.py"), _space, ("torch",))


def _gluon_is_there() -> bool:
    from .. import _op

    # Not cached here: `Choice` caches the answer, and drops it where implementations are exchanged.
    return _op.unavailable("gluon", "cuda", torch.bfloat16) is None


def otherwise(dtype: torch.dtype) -> str:
    """The implementation of what is lacking here."""
    return float32.OTHERWISE if dtype == torch.float32 else OTHERWISE


def lacks(function: str, hidden: int, x: Tensor, *others: Tensor) -> bool:
    """Whether a call of a function is left to another, which takes less time or serves matrices that are not supported here.
    x as in `tiles.py`, dz for a down projection; for "gradient", all matrices."""
    if x.dtype == torch.float32:
        return function != "forward"
    if function == "gradient":
        return hidden % COLUMN_MULTIPLE != 0 or not all(map(describable, (x, *others)))
    return _config(SHARED[function][0], x, hidden).tiles == "gluon"


def path(x: Tensor, halves: Halves) -> str:
    """For `explain_dispatch`: copies, functions left to OTHERWISE, and the host fast path. A down projection is taken to have as
    many features out as x has."""
    if x.dtype == torch.float32:
        return f"{'in tf32' if in_tf32(x) else 'without tensor cores'}; gradients by {float32.OTHERWISE}"
    hidden = halves.value.shape[0]
    copies = f"{ALIGNED}: other matrices are copied" if odd(hidden, (x, halves.value, halves.gate)) else ""
    names = [name for function, (_, name) in SHARED.items() if lacks(function, hidden, x)]
    left = f"{' and '.join(names)} are computed by {OTHERWISE}, which takes less time at this size" if names else ""
    if x.shape[0] < TILES_FROM:
        others = " and ".join(name for _, name in list(SHARED.values())[1:])
        left = f"{others} are computed by others, unless it is named: its tiles are for more rows"
    tuned = CHOICE.explain(x.get_device(), [_key(kernel, x, hidden) for kernel in tiles.RACES])
    return "; ".join(filter(None, (copies, left, tuned, _host.explain())))


def _run(
    epilogue: int, activation: str, x: Tensor, value: Tensor | None = None, gate: Tensor | None = None,
    bias: tuple[Tensor | None, Tensor | None] = (None, None), y: Tensor | None = None,
    outputs: tuple[Tensor | None, Tensor | None] = (None, None), inputs: tuple[Tensor | None, Tensor | None] = (None, None),
    dbias: Tensor | None = None, width: int = 0,
) -> None:  # fmt: skip
    """Launch the product of x with an epilogue that writes y and `outputs` (u and g or their gradients) and reads
    `inputs` (dy, or u and g). GATE: x is dy, and there is no product. FEW has tiles of `width` features. What TMA does not
    support is copied, but in float32 without tf32, which needs no TMA."""
    rows = x.shape[0]
    if rows == 0:
        return no_rows(dbias)
    tf32 = in_tf32(x)
    if tf32:
        epilogue = {Y: TF32_Y, PREACT: TF32_PREACT}[epilogue]
    kernel = _kernel(x.dtype, activation, tf32)
    if isinstance(kernel, str):
        raise RuntimeError(
            f'gated_linear: impl must be one that is here, got "cuda": {kernel}; use impl="{otherwise(x.dtype)}"'
        )
    sums = new_sums(dbias, -(-rows // (GATE_ROWS if value is None else ROWS)))
    written = (y, *outputs)
    buffers: tuple[Tensor | None, ...] = written
    read: tuple[Tensor | None, ...] = (x, value, gate, *inputs)
    if x.dtype in HALF or tf32:
        buffers, read = tuple(each(aligned_output, *written)), tuple(each(aligned, *read))
    matrices = (*read[:3], *buffers, *read[3:])
    depth, hidden = x.shape[1], x.shape[1] if value is None else value.shape[epilogue == DOWN]
    plan = _PLAN.pack(
        rows, hidden, depth, *(0 if t is None else t.stride(0) for t in (*matrices, *bias)), x.dtype == torch.bfloat16,
        ACTIVATIONS.index(activation), epilogue, width,
    )  # fmt: skip
    call = _CALL.pack(*(0 if t is None else t.data_ptr() for t in (*matrices, *bias, sums, dbias)))
    kernel.launch(plan, call, x.get_device(), "gated_linear")
    for to, buffer in zip(written, buffers, strict=True):
        if to is not None and buffer is not None and to is not buffer:
            copy_to(buffer, to)


def _forward_by(kernel: str, x: Tensor, hidden: int) -> tuple[int, int]:
    """The epilogue for "y" or "preact", and the tile width of the weight-streaming kernel (0 for the others)."""
    upright = Y if kernel == "y" else PREACT
    if x.dtype == torch.float32:
        return upright, 0
    config = _config(kernel, x, hidden, or_gluon=False)
    if config.tiles == "stream":
        return FEW, config.size
    sideways = {each.rows: each.epilogue for each in tiles.SIDEWAYS}
    return sideways.get(config.size, upright), 0


def launcher(kernel: str, x: Tensor, hidden: int, activation: str) -> tuple[int | None, ...]:
    """What the host fast path needs to replay a call of a kernel: the entry point, the function that explains its error codes,
    the epilogue, and the tile width as of `_forward_by`; zeros if it goes through Python."""
    if x.dtype == torch.float32:
        return 0, 0, 0, 0
    how = ({"gate": GATE, "down": DOWN}[kernel], 0) if kernel in ("gate", "down") else _forward_by(kernel, x, hidden)
    return *_kernel(x.dtype, activation).addresses(), *how  # type: ignore[union-attr]


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    """`impl="cuda"`: this and the gradients as in `reference.py`."""
    value, gate, *bias = halves
    epilogue, width = _forward_by("y" if preact is None else "preact", x, value.shape[0])
    outputs = (None, None) if preact is None else split_preact(preact, spec)
    _run(epilogue, spec.activation, x, value, gate, (bias[0], bias[1]), y, outputs, width=width)


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    outputs, inputs = split_preact(dpreact, spec), split_preact(preact, spec)
    _run(GATE, spec.activation, dy, outputs=outputs, inputs=inputs, dbias=dbias)


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Preact, spec: Spec, dbias: Tensor | None
) -> None:
    value, gate, *bias = halves
    outputs = split_preact(dpreact, spec)
    _run(GRADIENT, spec.activation, x, value, gate, (bias[0], bias[1]), None, outputs, (dy, None), dbias)


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    outputs, inputs = split_preact(dpreact, spec), split_preact(preact, spec)
    _run(DOWN, spec.activation, dz, w_down, y=y, outputs=outputs, inputs=inputs, dbias=dbias)
