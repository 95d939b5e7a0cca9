"""Lightning Thunder: the trace after each of its passes, and the traffic of the last one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ..ledger import Kernel
from ..plugin import Run
from ..problem import Problem
from . import graphs, inductor, passes, python
from .stage import Stage, tidy

#: Symbols that return a view, or no tensor at all.
VIEWS = {
    "view", "reshape", "permute", "transpose", "t", "mT", "expand", "unsqueeze", "squeeze", "flatten", "unflatten",
    "getitem", "__getitem__", "select", "slice", "narrow", "chunk", "split", "unbind", "broadcast_in_dim", "expand_as", "detach",
    "movedim", "stride_order", "shallow_copy", "update_aliases",
}  # fmt: skip


def stages(problem: Problem, run: Run) -> list[Stage]:
    """`source`; the traces of the forward and, with gradients, of the backward; Inductor's code for their regions."""
    import thunder

    with inductor.watched() as generated:
        passes.once(problem, run)
    found = [python.source(python.functions(problem.program().function))]
    for part, traces in (
        ("", thunder.last_traces(run.call)),
        ("backward", thunder.last_backward_traces(run.call) if problem.task.pass_ != "fwd" else []),
    ):
        for number, trace in enumerate(traces):
            stage = _trace(trace, number, part)
            if stage.text != found[-1].text:  # skip passes that changed nothing
                found.append(stage)
    return [*found, *inductor.stages(generated, problem.device.type)]


def _trace(trace: Any, number: int, part: str) -> Stage:
    """A trace as Python; comments above its operations give their source lines."""
    provenance = trace.get_provenance()
    name = getattr(provenance, "pss", "") if provenance is not None else "as traced"
    name = re.sub(r"\s*\(took .*?\)", "", name).strip() or f"pass {number}"
    text = re.sub(r"\(took [^)]*\)", "", trace.python()).strip() + "\n"
    return Stage(
        stage="thunder", language="python", part=" ".join(filter(None, (part, name))), text=tidy(text),
        lines=graphs.comments(text), counts={"operations": sum(_counts(b) for b in trace.bound_symbols)},
    )  # fmt: skip


def traffic(problem: Problem, run: Run) -> list[Kernel]:
    """The operations of the final traces. A region compiled by torch.compile counts as Inductor's kernels; a region of
    another executor as one kernel."""
    import thunder

    with inductor.watched() as generated:
        passes.once(problem, run)
    traces = {"fwd": thunder.last_traces(run.call)}
    if problem.task.pass_ != "fwd":
        traces["bwd"] = thunder.last_backward_traces(run.call)
    compiled = iter(generated)  # in the order of the regions
    found: list[Kernel] = []
    held: dict[str, int] = {}
    for pass_, steps in traces.items():
        for symbol in steps[-1].bound_symbols if steps else ():  # no trace if the gradient is the one passed in
            kernel = _kernel(symbol, held)
            if kernel is None:
                continue
            region = next(compiled, None) if symbol.sym.name.startswith("TorchCompile") else None
            if pass_ == problem.task.pass_ or problem.task.pass_ == "fwd+bwd":
                found += [kernel] if region is None else region.kernels
    return found


def _counts(symbol: Any) -> bool:
    return not symbol.sym.name.startswith(("python_", "unpack_", "check_", "comment", "start_", "clear_"))


def _kernel(symbol: Any, held: dict[str, int]) -> Kernel | None:
    """The bytes of a bound symbol's tensors; None if it moves nothing. `held`: bytes behind the views so far, which may
    repeat elements."""
    inputs, outputs = _tensors(symbol.flat_args), _tensors(symbol.flat_outs)
    known = {proxy.name for proxy in inputs}
    outputs = [proxy for proxy in outputs if proxy.name not in known]
    if not _counts(symbol) or not outputs:
        return None
    read = sum(held.get(proxy.name, _bytes(proxy)) for proxy in inputs)
    if _is_view(symbol):
        held |= {proxy.name: min(_bytes(proxy), read) for proxy in outputs}
        return None
    return Kernel(name=symbol.sym.name, read=read, written=sum(map(_bytes, outputs)))


def _is_view(symbol: Any) -> bool:
    """Whether it only makes a view; `to` does if the dtype stays the same."""
    while symbol.sym.name == "to" and len(symbol.subsymbols) == 1:
        (symbol,) = symbol.subsymbols
    return symbol.sym.name in VIEWS


def _tensors(values: Sequence[Any]) -> list[Any]:
    """The distinct tensors among the values."""
    proxies = {v.name: v for v in values if hasattr(v, "shape") and hasattr(v, "dtype") and hasattr(v, "name")}
    return list(proxies.values())


def _bytes(proxy: Any) -> int:
    return math.prod(map(int, proxy.shape)) * int(proxy.dtype.bytes)
