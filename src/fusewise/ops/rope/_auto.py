"""Selects the implementation of a RoPE call.

`impl="auto"` takes the first of IMPLEMENTATIONS that supports the tensors, with two exceptions on a GPU. CUDA serves
calls whose kernel is shorter than Triton's launch, as its host overhead is far lower; and partial rotation, where it is
the faster at any size. No call waits for a compiler it did not ask for: CUDA is selected once its library has been
built, by `fusewise build` or by a call with `impl="cuda"`. (Without Triton, CUDA is the GPU implementation and the
first call builds it.) So the selection may change within a process, but results do not: CUDA is bitwise equal to
Triton, and where it would not be, with angles computed in the kernel, auto leaves the call to Triton whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..._shared import build
from .._choice import Choice
from .._common import KERNEL_FLOATS
from ._problem import Spec, Table

# In order of preference. Each has `launch(xs, ys, rotation)`, which writes the rotation of every x into its y; with y
# is x it works in place.
IMPLEMENTATIONS = ("triton", "cuda", "cpu", "reference")
choice = Choice("rope", IMPLEMENTATIONS)

# Bytes read and written up to which auto selects CUDA. An H200 moves them in 65 µs (4.1 TB/s); in the published rows
# the host overhead of a forward call is 45 to 126 µs in Triton, 5 to 17 in CUDA. Larger calls are bound by the device, where
# the two are within 2 % of each other, except in place with heads of 80 to 192 features, where Triton's kernel is 1 to 4 %
# faster; with partial rotation CUDA's is equal or up to 11 % faster, in training of Phi-2, GLM-4, DeepSeek-V3, GPT-NeoX, and
# more where 16 bytes at once do not fit the rotated features.
MOST_BYTES_FOR_CUDA = 256 * 2**20

COMPUTED_ANGLES = (
    "it is for tables of cos and sin: with angles computed in the kernel, its results are not bitwise equal to Triton's"
)


def serving(impl: str, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], encoded: str) -> Any:
    """The module that serves a call from xs into ys with `impl`, which may be "auto". A named one never falls back."""
    x = xs[0]
    if impl == "auto" and x.device.type == "cuda" and x.dtype in KERNEL_FLOATS:
        spec = Spec.decode(encoded)
        impl = "auto" if _passes_cuda_over(xs, spec, in_place=ys[0] is x) else "cuda"
    return choice.serving(impl, x.device.type, x.dtype)


def _passes_cuda_over(xs: tuple[Tensor, ...], spec: Spec, *, in_place: bool) -> str | None:
    """Why auto does not select CUDA for a call on a GPU, or None if it does."""
    if (reason := choice.unready(build.loads())) is not None:
        return reason
    if spec.table in ("angles", "inv_freq"):
        return COMPUTED_ANGLES
    features = spec.rotary_dim if in_place else 0  # read and written; 0: all
    moved = 2 * sum([x.shape[:-1].numel() * (features or x.shape[-1]) * x.element_size() for x in xs])
    if moved > MOST_BYTES_FOR_CUDA and not _copies(xs, spec, in_place):
        most = f"{MOST_BYTES_FOR_CUDA / 2**20:g}"
        return f"it is for calls that move up to {most} MiB, dominated by host overhead; this one moves {moved / 2**20:.0f} MiB"
    return None


def _copies(xs: tuple[Tensor, ...], spec: Spec, in_place: bool) -> bool:
    """Whether a part of each head is copied."""
    return not in_place and 0 < spec.rotary_dim < xs[0].shape[-1]


def explained(arguments: Mapping[str, Any]) -> tuple[str, str, dict[str, str]] | None:
    """What auto selects for a call on a GPU with these arguments of `rope` by name: the implementation, why, and why
    not Triton or CUDA. None if the order of preference decides."""
    xs = tuple(arguments[name] for name in ("q", "k") if isinstance(arguments[name], Tensor))
    if not xs or xs[0].device.type != "cuda" or xs[0].dtype not in KERNEL_FLOATS:
        return None
    in_place = "out" not in arguments  # only functions that are not in place have `out`
    spec = Spec(rotary_dim=arguments["rotary_dim"] or 0, table=table_of(arguments))
    reason = _passes_cuda_over(xs, spec, in_place=in_place)
    if reason is None and _copies(xs, spec, in_place):
        return (
            "cuda",
            "which is faster if part of each head is copied",
            {"triton": "it is for full rotation"},
        )
    if reason is None:
        most = f"{MOST_BYTES_FOR_CUDA / 2**20:g} MiB"
        why = f"which has the lowest host overhead, for a call that moves at most {most}"
        return "cuda", why, {"triton": f"it is for calls that move more than {most}"}
    chosen = choice.choose("cuda", xs[0].dtype)
    return None if chosen != "triton" else ("triton", "the first that serves the tensors", {"cuda": reason})


def table_of(arguments: Mapping[str, Any]) -> Table:
    """The kind of table that the arguments of a call hold."""
    return next((name for name in ("angles", "inv_freq") if arguments[name] is not None), "cos_sin")
