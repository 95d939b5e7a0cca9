"""Profiles a few calls with torch.profiler: the operator table, a trace for Perfetto, and flame graphs from its stacks.

`capture` runs in a separate process (`code/worker.py`), because a profiler slows every call and only one can be active.
None of its times is published. `fold` and `flame` are pure functions of the trace.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from .code import passes
from .code.stage import short
from .plugin import Run
from .problem import Problem
from .render import printable

#: Keep compilation and other first-call work out of the profile.
WARM_UP_CALLS = 3
CALLS = 10
#: Fewer calls if their inputs together would exceed this.
MOST_BYTES = 2**30
#: Categories of trace events that nest on a host thread.
HOST = frozenset({"python_function", "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
#: The annotation around each profiled call; flame graphs start below it.
STEP = "fusewise call"

#: Profiler frames that come with the annotation.
_PROFILER = re.compile(r"\(torch/(autograd/profiler\.py|profiler/)")

Stacks = dict[tuple[str, ...], float]


def capture(problem: Problem, run: Run, folder: Path) -> dict[str, Any]:
    """Profile CALLS passes, fewer of a large problem, and write table.txt, trace.json, flame.svg, flame.folded (and
    flame-device.* on a GPU).

    Returns {"rows": torch.profiler's table, a dict per line; "table": as text; "files": names; "calls": how many}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, step = passes.steps(problem, run)
    on_gpu = problem.device.type == "cuda"
    calls = max(1, min(CALLS, MOST_BYTES // max(problem.bytes_min(), 1)))
    for _ in range(WARM_UP_CALLS):
        step(before())
    averages = _profiled(problem, before, step, calls, stacks=False).key_averages()
    table = averages.table(
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total", row_limit=-1, max_name_column_width=55
    )
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8", errors="backslashreplace")
    # A second profile for the stacks: their frames would crowd the table and slow down what it measures.
    trace = folder / "trace.json"
    trace.unlink(missing_ok=True)
    _profiled(problem, before, step, calls, stacks=True).export_chrome_trace(str(trace))
    if not trace.exists():  # torch reports no error where it cannot write
        raise OSError(f"profile: the folder must have room for trace.json, got none in {folder}; make room")
    text = trace.read_text(encoding="utf-8", errors="replace")
    trace.write_text(text, encoding="utf-8")
    events = json.loads(text)["traceEvents"]
    host, device = fold(events)
    files = ["table.txt", "trace.json"]
    what = f"{problem.op} {problem.task.case} {problem.task.dtype} {problem.task.pass_}"
    for name, stacks, title in (("flame", host, "host"), ("flame-device", device, "device")):
        if stacks:
            folded = "".join(f"{';'.join(stack)} {round(us * 1000)}\n" for stack, us in sorted(stacks.items()))
            (folder / f"{name}.folded").write_text(folded, encoding="utf-8", errors="backslashreplace")
            drawn = flame(stacks, f"{what}: {title} time")
            (folder / f"{name}.svg").write_text(drawn, encoding="utf-8", errors="backslashreplace")
            files += [f"{name}.svg", f"{name}.folded"]
    return {"rows": rows(averages, on_gpu), "table": table, "files": files, "calls": calls}


def _profiled(
    problem: Problem, before: Callable[[], Any], step: Callable[[Any], Any], calls: int, *, stacks: bool
) -> Any:
    """A finished profile of `calls` steps, whose inputs exist beforehand. With stacks its events are for export only:
    in torch 2.13 some names are not UTF-8, and torch itself cannot read them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if problem.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    states = [before() for _ in range(calls)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*profiler", category=UserWarning)
        with torch.profiler.profile(activities=activities, with_stack=stacks, acc_events=not stacks) as profiler:
            for state in states:
                if stacks:
                    with torch.profiler.record_function(STEP):
                        step(state)
                else:
                    step(state)
            passes.synchronize(problem)
    return profiler


def rows(averages: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """torch.profiler's table as data: microseconds, percent of the sum of self times, calls."""
    total = sum(a.self_cpu_time_total for a in averages) or 1.0
    device_total = sum(getattr(a, "self_device_time_total", 0.0) for a in averages) or 1.0
    found = []
    for a in averages:
        row = {
            "name": a.key,
            "self_cpu_percent": 100 * a.self_cpu_time_total / total,
            "self_cpu_us": a.self_cpu_time_total,
            "cpu_total_percent": 100 * a.cpu_time_total / total,
            "cpu_total_us": a.cpu_time_total,
            "cpu_avg_us": a.cpu_time_total / max(a.count, 1),
            "calls": a.count,
        }
        if on_gpu:
            row |= {
                "self_device_us": a.self_device_time_total,
                "self_device_percent": 100 * a.self_device_time_total / device_total,
                "device_total_us": a.device_time_total,
                "device_avg_us": a.device_time_total / max(a.count, 1),
            }
        found.append(row)
    return sorted(found, key=lambda row: -row["self_device_us" if on_gpu else "self_cpu_us"])


def fold(events: Sequence[Mapping[str, Any]]) -> tuple[Stacks, Stacks]:
    """Microseconds by stack, outermost frame first, below the annotation STEP: self time on the host, and kernel time
    on the device under the stack that launched the kernel."""
    host: Stacks = {}
    device: Stacks = {}
    launched: dict[int, tuple[str, ...]] = {}
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in HOST:
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for found in threads.values():
        open_frames: list[tuple[float, str]] = []  # (end, name)
        for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
            while open_frames and open_frames[-1][0] <= event["ts"]:
                open_frames.pop()
            below = _below_step([name for _, name in open_frames])
            open_frames.append((event["ts"] + event["dur"], frame(event["name"])))
            stack = _below_step([name for _, name in open_frames])
            if stack is None:
                continue
            host[stack] = host.get(stack, 0.0) + event["dur"]
            if below:  # self time excludes children
                host[below] = host.get(below, 0.0) - event["dur"]
            correlation = (event.get("args") or {}).get("correlation")
            if correlation is not None:
                launched[correlation] = stack
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            above = launched.get((event.get("args") or {}).get("correlation", -1))
            if above is not None:
                stack = (*above, frame(event["name"]))
                device[stack] = device.get(stack, 0.0) + event["dur"]
    return {stack: us for stack, us in host.items() if us > 0 and not any(map(_PROFILER.search, stack))}, device


def _below_step(names: Sequence[str]) -> tuple[str, ...] | None:
    """The frames from the annotation on; None outside of it."""
    return tuple(names[names.index(STEP) :]) if STEP in names else None


def frame(name: str) -> str:
    """A frame's name without directories, addresses and the separators of the folded format."""
    place = re.match(r"(.+\.py)\((\d+)\): (.*)", name)
    if place:
        name = f"{place[3]} ({short(place[1])}:{place[2]})"
    return re.sub(r" at 0x[0-9a-f]+", "", name).replace(";", ",").replace("\n", " ")


WIDTH, ROW, CHARACTER = 1200, 17, 6.6


def flame(stacks: Stacks, title: str) -> str:
    """The stacks as a flame graph in a standalone SVG: width is time, and callees are drawn below their caller."""
    tree: dict[str, Any] = {"time": 0.0, "parts": {}}
    depth = 0
    for stack, us in stacks.items():
        node = tree
        node["time"] += us
        depth = max(depth, len(stack))
        for name in stack:
            node = node["parts"].setdefault(name, {"time": 0.0, "parts": {}})
            node["time"] += us
    scale = WIDTH / (tree["time"] or 1.0)
    boxes: list[str] = []

    def text(value: str) -> str:
        return escape(printable(value))

    def draw(node: Mapping[str, Any], left: float, level: int) -> None:
        for name, part in sorted(node["parts"].items(), key=lambda item: -item[1]["time"]):
            width = part["time"] * scale
            if width >= 0.3:
                share = 100 * part["time"] / (tree["time"] or 1.0)
                shown = name[: max(0, int((width - 6) / CHARACTER))]
                top = 30 + ROW * level
                hue = 20 + sum(map(ord, name)) % 35
                boxes.append(
                    f"<g><title>{text(name)}: {part['time']:.1f} µs, {share:.1f} %</title>"
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 1}" rx="2" '
                    f'fill="hsl({hue} 85% 68%)"/>'
                    + (f'<text x="{left + 3:.1f}" y="{top + 12}">{text(shown)}</text>' if len(shown) > 2 else "")
                    + "</g>"
                )
                draw(part, left, level + 1)
            left += width

    draw(tree, 0.0, 0)
    height = 40 + ROW * depth
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="ui-monospace, monospace" font-size="11">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fffdf8"/>\n'
        f'<text x="4" y="18" font-size="13">{text(title)}, {tree["time"]:.0f} µs in all</text>\n'
        + "\n".join(boxes)
        + "\n</svg>\n"
    )
