"""torch.compile above its backend: Dynamo's FX graph and bytecode, and AOTAutograd's ATen graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from . import python
from .stage import Stage, short, tidy


def stages(call: Callable[[Callable[..., Any]], Callable[[], Any]], function: Callable[..., Any]) -> list[Stage]:
    """`fx`, `dynamo-bytecode` and `aten` of `function`. `call(compiled)` returns a callable that runs the pass with
    it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.convert_frame import register_bytecode_hook

    found: list[Stage] = []
    codes: list[tuple[str, CodeType]] = []

    def keep(stage: str, part: str) -> Callable[..., Any]:
        def compiler(module: Any, _: Any) -> Any:
            parts = sum(other.stage == stage and other.part.startswith(part) for other in found)
            found.append(readable(module, stage, f"{part} {parts + 1}" if parts else part))
            return make_boxed_func(module.forward)

        return compiler

    lower = aot_autograd(fw_compiler=keep("aten", "forward"), bw_compiler=keep("aten", "backward"))

    def backend(module: Any, inputs: Sequence[Any]) -> Any:
        found.append(readable(module, "fx"))
        return lower(module, inputs)

    def rewritten(code: CodeType, new_code: CodeType) -> None:
        codes.append((code.co_name, new_code))

    torch.compiler.reset()
    hook = register_bytecode_hook(rewritten)
    try:
        call(torch.compile(function, backend=backend, dynamic=False))()
    finally:
        hook.remove()
        torch.compiler.reset()
    fx = [stage for stage in found if stage.stage == "fx"]
    rest = [stage for stage in found if stage.stage != "fx"]
    return [*fx, python.bytecode(codes, "dynamo-bytecode"), *rest]


def readable(module: Any, stage: str, part: str = "") -> Stage:
    """An FX graph as Python with types and shapes; its lines are mapped by the comments that FX writes."""
    text = module.print_readable(print_output=False, include_stride=False, include_device=False).strip() + "\n"
    nodes = [node for node in module.graph.nodes if node.op.startswith("call")]
    return Stage(
        stage=stage, language="python", part=part, text=tidy(text), lines=comments(text),
        counts={"nodes": len(nodes)},
    )  # fmt: skip


_COMMENT = re.compile(r"^\s*#\s*(?:File: )?([^:]+\.py):(\d+)(?: in |:)")


def comments(text: str) -> dict[int, str]:
    """Lines after a comment `# File: path:line in function` map to that location, until an empty line or another
    comment."""
    lines: dict[int, str] = {}
    here = None
    for number, line in enumerate(text.splitlines(), start=1):
        if place := _COMMENT.match(line):
            here = f"{short(place[1].strip())}:{place[2]}"
        elif not line.strip() or line.lstrip().startswith(("# No stacktrace", "return ", "def ", "class ")):
            here = None
        if here is not None:
            lines[number] = here
    return lines
