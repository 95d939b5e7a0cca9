"""Tuning jobs of `fusewise tune geglu`: the kernels of the gated linear unit, each run through the code that serves calls.

    y         the forward product of an inference
    preact    the forward product that also writes the pre-activations
    gate      the elementwise backward of save="preact"
    gradient  the recomputing backward of save="input"
    down      the gradient through the down projection of an MLP

Shape legend as in `_problem.py`. A product is tuned for its shape and dtype, with the activation and bias of the case;
the result is used with any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._cases import DTYPES
from .._tuned import Job, Tuned, Watch
from . import _op, reference
from ._problem import Halves, Spec, new_preact
from .cases import GatedCase, case

# How to run each kernel of a module with the functions of `reference.py`: (module, inputs, weights, outputs, dbias, spec).
_CALLS: dict[str, Callable[..., None]] = {
    "y": lambda m, i, w, o, b, s: m.forward(*i, w, s, *o, None),
    "preact": lambda m, i, w, o, b, s: m.forward(*i, w, s, *o),
    "gate": lambda m, i, w, o, b, s: m.gradient(*i, *o, s, b),
    "gradient": lambda m, i, w, o, b, s: m.recompute_gradient(*i, w, *o, s, b),
    "down": lambda m, i, w, o, b, s: m.down_gradient(i[0], w, i[1], *o, s, b),
}
KERNELS = tuple(_CALLS)
SHAPE = "M,D,F"
IMPLS = ("gluon", "triton")  # that may be named; cuda chooses among its tiles and gluon's in calls that name none
ROWS = 4096  # rows computed in float64 at a time


def tuned(device: torch.device) -> list[Tuned[Any]]:
    """The stores of tuning results for this device: first those that a call's dispatch looks up, then its launches'."""
    return [*_stores(device, "CHOICE"), *_stores(device, "TUNED")]


def _stores(device: torch.device, name: str) -> list[Tuned[Any]]:
    able = [i for i in _op.IMPLEMENTATIONS if _op.choice.unavailable(i, device.type, torch.bfloat16) is None]
    return [store for impl in able if (store := getattr(_op.choice.implementation(impl), name, None)) is not None]


def unavailable(device: torch.device) -> list[str]:
    """For each tunable implementation that does not serve this device, why."""
    return [r for i in IMPLS if (r := _op.choice.unavailable(i, device.type, torch.bfloat16)) is not None]


def check(name: str | None, shape: Sequence[int] | None, dtypes: Sequence[str], kernels: Sequence[str]) -> None:
    """Raise ValueError for an unknown case, shape, dtype or kernel."""
    _case(name, shape)
    for kernel in kernels:
        if kernel not in KERNELS:
            raise ValueError(f"tune: epilogue must be one of {', '.join(KERNELS)}, got {kernel!r}; choose one")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"tune: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one")


def jobs(
    name: str | None, shape: Sequence[int] | None, dtypes: Sequence[str], kernels: Sequence[str], device: torch.device,
    impl: str | None = None,
) -> Iterator[Job]:  # fmt: skip
    """Jobs for the kernels of one case, or of a `shape` (rows, features, hidden features), created lazily.

    Without `kernels`, all that have configurations; without `dtypes`, those of the case (for a shape: bf16);
    without `impl`, the one that serves a call, on a CPU Triton's interpreter.

    Raises:
        ValueError: as `check`, or the implementation cannot serve a job.
    """
    check(name, shape, dtypes, kernels)
    found = _case(name, shape)
    for dtype in dtypes or found.dtypes:
        library = dtype == "fp32"  # BLAS computes the products
        there = {"gate"} if library else {kernel for kernel in KERNELS if kernel != "down" or found.out}
        for kernel in kernels or [kernel for kernel in KERNELS if kernel in there]:
            if library and kernel != "gate":
                raise ValueError(
                    f"tune: kernel must be gate in fp32, whose products are the platform's library's, got {kernel!r}; "
                    "leave it out or take another dtype"
                )
            job = _job(found, dtype, kernel, device, impl or ("triton" if device.type == "cpu" else "auto"))
            if not isinstance(job, str):
                yield job
            elif kernels or impl:
                raise ValueError(
                    f"tune: impl must be one that has configurations, {' or '.join(IMPLS)}, got {impl or 'auto'!r}, which "
                    f"for {kernel} here is {job}; name another"
                )


def _case(name: str | None, shape: Sequence[int] | None) -> GatedCase:
    if name is not None:
        return case(name)
    if shape is None or len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"tune: shape must be three positive numbers, {SHAPE}, got {shape}; give all three")
    rows, features, hidden = shape
    return GatedCase(
        name="shape", rows=rows, features=features, hidden=hidden, bias=True, out=features, dtypes=("bf16",)
    )


def _job(found: GatedCase, dtype: str, kernel: str, device: torch.device, impl: str) -> Job | str:
    """The tuning job, or the name of the implementation if it has nothing to tune."""
    drawn = found.make_inputs(device, dtype)
    spec = Spec(found.activation, "stacked", found.gate_first)
    x, weight, *bias = drawn.operands
    halves = Halves.of(spec, weight, None, bias[0] if bias else None)
    dy = drawn.gradients[0]
    rows, hidden = dy.shape
    weights: Any = halves
    if kernel in ("y", "preact"):
        inputs: tuple[Tensor, ...] = (x,)
        outputs: tuple[Tensor, ...] = (torch.empty_like(dy),)
        if kernel == "preact":
            outputs = (*outputs, new_preact(x, hidden, spec))
    elif kernel == "gradient":
        inputs, outputs = (dy, x), (new_preact(x, hidden, spec),)
    else:
        preact = torch.randn(rows, 2 * hidden, device=device, dtype=x.dtype)
        inputs, outputs = (dy, preact), (torch.empty_like(preact),)
        if kernel == "down":
            out = found.out or found.features
            weights = drawn.w_down
            if weights is None:
                weights = torch.randn(out, hidden, device=device, dtype=x.dtype) / hidden**0.5
            inputs, outputs = (torch.randn(rows, out, device=device, dtype=x.dtype), preact), (dy, *outputs)
    summed = bool(bias) and kernel in ("gate", "gradient", "down")
    dbias = _op.new_dbias(x, hidden, True) if summed else None

    def serving() -> Any:
        """The module that serves a call, as its dispatch finds it."""
        if kernel == "y":
            return _op.serving(impl, "y", spec, hidden, x, halves.value, halves.gate)
        if kernel == "preact":
            return _op.keeping(impl, spec, x, halves)
        if kernel == "gate":
            return _op.taking_gradient(impl, spec, *inputs, *outputs)
        if kernel == "down":
            return _op.taking_down_gradient(impl, spec, inputs[0], weights)
        return _op.having(
            "recompute_gradient", _op.serving(impl, "gradient", spec, hidden, x, halves.value, halves.gate), hidden, x
        )

    looked_up, module = _watched(_stores(device, "CHOICE"), serving)
    store = looked_up or getattr(module, "TUNED", None)
    if store is None:
        return str(module.__name__.rpartition(".")[2].lstrip("_"))
    call = _CALLS[kernel]

    def by_torch(to: torch.dtype, keep: torch.dtype) -> tuple[Tensor, ...]:
        """The reference result, computed in dtype `to` and returned in `keep`, in chunks of rows."""
        results = tuple(torch.empty(t.shape, dtype=keep, device=device) for t in outputs)
        total = None if dbias is None else torch.zeros_like(dbias, dtype=torch.promote_types(to, torch.float32))
        wide = _converted(weights, to)
        for start in range(0, rows, ROWS):
            part = [t[start : start + ROWS].to(to) for t in inputs]
            out = [t[start : start + ROWS].to(to) for t in results]
            sums = None if total is None else torch.empty_like(total)
            call(reference, part, wide, out, sums, spec)
            for result, chunk in zip(results, out, strict=True):
                result[start : start + ROWS] = chunk
            if total is not None and sums is not None:
                total += sums
        return results if total is None else (*results, total)

    return Job(
        tuned=store,
        device=device,
        outputs=outputs if dbias is None else (*outputs, dbias),
        run=lambda: call(serving(), inputs, weights, outputs, dbias, spec),
        truths=lambda: by_torch(torch.float64, torch.float64 if x.dtype == torch.float32 else torch.float32),
        plain=lambda: by_torch(x.dtype, x.dtype),
    )


def _watched(stores: Sequence[Tuned[Any]], run: Callable[[], Any]) -> tuple[Tuned[Any] | None, Any]:
    """The first of the stores in which `run` looks something up, and its result."""
    watches = {store: Watch() for store in stores}
    with contextlib.ExitStack() as watching:
        for store, watch in watches.items():
            watching.enter_context(store.using(watch))
        result = run()
    return next((store for store, watch in watches.items() if watch.keys), None), result


def _converted(weights: Any, to: torch.dtype) -> Any:
    if isinstance(weights, Tensor):
        return weights.to(to)
    value_bias, gate_bias = (None if b is None else b.to(to) for b in (weights.value_bias, weights.gate_bias))
    return Halves(weights.value.to(to), weights.gate.to(to), value_bias, gate_bias)
