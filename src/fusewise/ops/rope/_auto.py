"""Which implementation serves a call of RoPE.

`impl="auto"` takes the first of IMPLEMENTATIONS that serves the tensors, but for calls on a GPU that end before Triton has
started the next one, which take CUDA, whose calls cost the host a fifth; and those that copy a part of every head, which CUDA
does the faster at any size. No call waits for a compiler that it did not ask for: CUDA is taken once its library is there, from
`fusewise build` or from a first call with `impl="cuda"`. (Where there is no Triton, CUDA is what a GPU has, and the first call
builds it.) So what auto takes may change within a process. What it returns does not: CUDA gives the bits of Triton, and where it
would not, with angles that are computed in the kernel, auto leaves the call to Triton whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..._shared import build
from .._choice import Choice
from .._common import KERNEL_FLOATS
from ._problem import Spec, Table

# In order of preference. Each has `launch(xs, ys, rotation)`, which writes the rotation of every x into its
# y; where y is x it works in place.
IMPLEMENTATIONS = ("triton", "cuda", "cpu", "reference")
choice = Choice("rope", IMPLEMENTATIONS)

# Bytes read and written up to which auto takes CUDA. An H200 moves them in 65 µs (4.1 TB/s), and a call in Triton keeps its host
# 46 to 106 in the published rows, in CUDA 5 to 16; above it is the device that counts, and Triton's kernel is 1 to 4 % faster. But
# where a part of each head is copied CUDA's is level or faster by up to 7 %, in training of Phi-2, GLM-4, DeepSeek-V3 and GPT-NeoX.
MOST_BYTES_FOR_CUDA = 256 * 2**20

COMPUTED_ANGLES = "it is for tables of cos and sin: angles that are computed in the kernel would not have Triton's bits"


def serving(impl: str, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], encoded: str) -> Any:
    """The module that serves a call from xs into ys with `impl`, which may be "auto". A named one is taken or refused."""
    x = xs[0]
    if impl == "auto" and x.device.type == "cuda" and x.dtype in KERNEL_FLOATS:
        spec = Spec.decode(encoded)
        impl = "auto" if _passes_cuda_over(xs, spec, in_place=ys[0] is x) else "cuda"
    return choice.serving(impl, x.device.type, x.dtype)


def _passes_cuda_over(xs: tuple[Tensor, ...], spec: Spec, *, in_place: bool) -> str | None:
    """Why auto does not take CUDA for a call on a GPU, or None if it does."""
    if (reason := choice.unready(build.loads())) is not None:
        return reason
    if spec.table in ("angles", "inv_freq"):
        return COMPUTED_ANGLES
    features = spec.rotary_dim if in_place else 0  # that move; 0: all
    moved = 2 * sum([x.shape[:-1].numel() * (features or x.shape[-1]) * x.element_size() for x in xs])
    if moved > MOST_BYTES_FOR_CUDA and not _copies(xs, spec, in_place):
        most = f"{MOST_BYTES_FOR_CUDA / 2**20:g}"
        return (
            f"it is for calls that move up to {most} MiB, whose time is the host's; this one moves {moved / 2**20:.0f}"
        )
    return None


def _copies(xs: tuple[Tensor, ...], spec: Spec, in_place: bool) -> bool:
    """Whether a part of each head is copied, and what rotates is in halves of accesses of at least 8 bytes."""
    rotates, x = spec.rotary_dim, xs[0]
    return not in_place and 0 < rotates < x.shape[-1] and rotates * x.element_size() % 16 == 0


def explained(arguments: Mapping[str, Any]) -> tuple[str, str, dict[str, str]] | None:
    """What auto takes for a call on a GPU, `arguments` those of `rope` by name: the implementation, why, and why not Triton
    or CUDA. None where the order of preference says all."""
    xs = tuple(arguments[name] for name in ("q", "k") if isinstance(arguments[name], Tensor))
    if not xs or xs[0].device.type != "cuda" or xs[0].dtype not in KERNEL_FLOATS:
        return None
    in_place = "out" not in arguments  # which the functions that write to new tensors take
    spec = Spec(pairing=arguments["pairing"], rotary_dim=arguments["rotary_dim"] or 0, table=table_of(arguments))
    reason = _passes_cuda_over(xs, spec, in_place=in_place)
    if reason is None and _copies(xs, spec, in_place):
        return (
            "cuda",
            "which is the faster where a part of each head is copied",
            {"triton": "it is for heads that rotate whole"},
        )
    if reason is None:
        most = f"{MOST_BYTES_FOR_CUDA / 2**20:g} MiB"
        why = f"which costs the host the least, for a call that moves at most {most}"
        return "cuda", why, {"triton": f"it is for calls that move more than {most}"}
    chosen = choice.choose("cuda", xs[0].dtype)
    return None if chosen != "triton" else ("triton", "the first that serves the tensors", {"cuda": reason})


def table_of(arguments: Mapping[str, Any]) -> Table:
    """From which of the tables that the arguments of a call may hold its angles come."""
    return next((name for name in ("angles", "inv_freq") if arguments[name] is not None), "cos_sin")
