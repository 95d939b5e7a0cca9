"""Dispatch: selects the implementation of an operation for a call, and explains why others are not selected.

An operation is a folder whose `reference.py` supports everything; every other implementation is a module `_<name>` in
it with `unavailable(device_type)`, which returns why it cannot serve that device, or None. All compute in float32, from
float32, bfloat16 and float16 unless their `DTYPES` are fewer. An implementation with `refuses(...)` may leave supported
tensors to the next one. One that lacks some functions of the operation names another implementation for those. Both are
handled by the operation itself (`gated_linear/_op.py`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._shared import build, cuda
from ._common import KERNEL_FLOATS, check_one_of, dtype_name, fail


class Choice:
    """The implementations of one operation, in order of preference. All answers are cached, to keep host overhead low."""

    def __init__(self, op: str, names: tuple[str, ...]) -> None:
        self.op, self.names = op, names
        self.implementation = functools.cache(self._implementation)
        self.unavailable = functools.cache(self._unavailable)
        self.choose = functools.cache(self._choose)
        self.serving = functools.cache(self._serving)
        self.unready = functools.cache(self._unready)

    def _implementation(self, impl: str) -> Any:
        """The module of an implementation, imported on first use."""
        folder = self.op.rstrip("_")  # in-place operations end in "_"
        # No f-string: it would format a str enum as its member name.
        return importlib.import_module(
            ".".join((__package__, folder, "reference" if impl == "reference" else "_" + impl))
        )

    def _unavailable(self, impl: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why `impl` cannot serve tensors of this device and dtype, or None if it can."""
        if impl == "reference":
            return None
        if dtype not in KERNEL_FLOATS:
            return f"{impl} computes in float32 and takes float32, bfloat16 and float16, not {dtype_name(dtype)}"
        try:
            module = self.implementation(impl)
        except ImportError as error:
            return f"{impl} cannot be imported: {error}"
        dtypes = getattr(module, "DTYPES", KERNEL_FLOATS)
        if dtype not in dtypes:
            return f"{impl} takes {' and '.join(map(dtype_name, dtypes))}, not {dtype_name(dtype)}"
        reason: str | None = module.unavailable(device_type)
        return reason

    def _choose(self, device_type: str, dtype: torch.dtype) -> str:
        """The implementation for impl="auto": the first that can serve the tensors.

        The Triton interpreter, which exists to check kernels, is never selected. So a call on a CPU does not import Triton.
        """
        return next(self.able(device_type, dtype))

    def able(self, device_type: str, dtype: torch.dtype) -> Iterator[str]:
        """The candidates for impl="auto", in order; the last is the reference, which supports everything."""
        for impl in self.names:
            if device_type == "cpu" and impl in ("triton", "gluon"):
                continue
            if self.unavailable(impl, device_type, dtype) is None:
                yield impl

    def _serving(self, impl: str, device_type: str, dtype: torch.dtype) -> Any:
        """The module that serves a call with `impl`, which may be "auto". A named one never falls back."""
        if impl == "auto":
            impl = self.choose(device_type, dtype)
        elif (reason := self.unavailable(impl, device_type, dtype)) is not None:
            raise self.refusal(impl, reason)
        return self.implementation(impl)

    def _unready(self, loads: int) -> str | None:
        """Why impl="auto" cannot use CUDA without compiling, or None if it can. Cached until another library is loaded
        (`loads` is `build.loads()`). So no call of RoPE waits for nvcc unless it asked for it."""
        if (reason := cuda.no_gpu("cuda")) is not None:
            return str(reason)
        try:
            recipe = self.implementation("cuda").recipe(cuda.present())
            if not build.built(*recipe):
                return build.why_not(recipe, 'its library is not built; run `fusewise build` or call with impl="cuda"')
        except build.BuildError as error:
            return str(error)
        # The library is built, so this only loads it.
        return self.unavailable("cuda", "cuda", KERNEL_FLOATS[0])

    def check(self, op: str, x: Tensor, impl: object) -> None:
        """Check that `impl` is "auto" or can serve x."""
        check_one_of(op, "impl", impl, ("auto", *self.names))
        # Under tracing the operator checks this when it runs: probing the machine cannot be traced.
        if impl != "auto" and not torch.compiler.is_compiling():
            reason = self.unavailable(impl, x.device.type, x.dtype)
            if reason is not None:
                fail(op, "impl", "be able to serve the tensors", f"{impl!r}: {reason}", 'use impl="auto"')

    def refusal(self, impl: str, reason: str) -> ValueError:
        """The error for a named implementation that cannot serve the tensors."""
        return ValueError(f'{self.op}: impl must be able to serve the tensors, got {impl!r}: {reason}; use impl="auto"')
