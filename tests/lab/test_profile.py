"""Profiles: stacks folded from constructed traces, well-formed flame graphs, and a real profile in its own process."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fusewise.cli import cli
from fusewise.lab import profile

SVG = "{http://www.w3.org/2000/svg}"
FUNCTIONS = Path(__file__).with_name("user_functions.py")


def event(
    name: str, start: float, length: float, category: str = "cpu_op", thread: int = 1, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length, "args": args}


def step(start: float, length: float, thread: int = 1) -> dict[str, Any]:
    return event(profile.STEP, start, length, "user_annotation", thread)


def test_time_goes_to_the_innermost_frame() -> None:
    host, device = profile.fold(
        [
            event("main", 0, 100, "python_function"),
            step(10, 60),
            event("/x/mine.py(7): f", 10, 50, "python_function"),
            event("aten::mul", 20, 10),
            event("aten::mul", 40, 15),
            event("aten::empty", 42, 5),
            event("aten::after", 80, 10),  # outside the timed region
            event("aten::elsewhere", 20, 10, thread=2),
        ]
    )
    root = profile.STEP
    assert host == {
        (root,): 10,
        (root, "f (/x/mine.py:7)"): 25,
        (root, "f (/x/mine.py:7)", "aten::mul"): 20,
        (root, "f (/x/mine.py:7)", "aten::mul", "aten::empty"): 5,
    }
    assert sum(host.values()) == 60 and not device


def test_kernels_are_under_the_stack_that_launched_them() -> None:
    _, device = profile.fold(
        [
            step(0, 50),
            event("aten::mul", 5, 20),
            event("cudaLaunchKernel", 10, 5, "cuda_runtime", correlation=3),
            event("vectorized;kernel", 30, 7, "kernel", thread=7, correlation=3),
            event("stray", 40, 9, "kernel", thread=7, correlation=99),
        ]
    )
    assert device == {(profile.STEP, "aten::mul", "cudaLaunchKernel", "vectorized,kernel"): 7}


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=12)


def nested(found: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """The spans that nest within each other and within [0, 100), like calls on one thread."""
    kept: list[tuple[int, int]] = []
    for start, length in found:
        end = start + length
        if all(e <= start or s >= end or (s <= start and end <= e) or (start <= s and e <= end) for s, e in kept):
            kept.append((start, end))
    return [event(f"op{i}", s, e - s) for i, (s, e) in enumerate(kept)]


@given(spans)
def test_folding_loses_no_time(found: list[tuple[int, int]]) -> None:
    host, _ = profile.fold([step(0, 100), *nested(found)])
    assert sum(host.values()) == pytest.approx(100)
    assert all(us > 0 and stack[0] == profile.STEP for stack, us in host.items())


def test_a_flame_graph_is_well_formed_whatever_the_names() -> None:
    text = profile.flame({("a", "<script>&\"'"): 30.0, ("a", "\x1b\x00c"): 5.0, ("a",): 5.0, ("b",): 60.0}, "t < u\x07")
    root = ElementTree.fromstring(text)
    assert "<script>" not in text
    titles = [str(t.text) for t in root.iter(f"{SVG}title")]
    assert "<script>&\"': 30.0 µs, 30.0 %" in titles and "b: 60.0 µs, 60.0 %" in titles
    widths = {str(g.findtext(f"{SVG}title")): float(str(g[1].get("width"))) for g in root.iter(f"{SVG}g")}
    assert widths["b: 60.0 µs, 60.0 %"] == pytest.approx(0.6 * profile.WIDTH)
    inner = next(g[1] for g in root.iter(f"{SVG}g") if "script" in str(g.findtext(f"{SVG}title")))
    outer = next(g[1] for g in root.iter(f"{SVG}g") if str(g.findtext(f"{SVG}title")).startswith("a:"))
    assert float(str(inner.get("y"))) == float(str(outer.get("y"))) + profile.ROW
    assert inner.get("x") == outer.get("x")


def test_frames_have_no_addresses() -> None:
    assert profile.frame("<built-in method f of Tensor object at 0x7f00>") == "<built-in method f of Tensor object>"


def test_a_real_profile(tmp_path: Path) -> None:
    arguments = [
        "profile",
        "gelu",
        "--case",
        "gelu-256",
        "--pass",
        "fwd",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "p"),
    ]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["aten::tanh"]["calls"] == found["calls"] == 10
    assert by_name["aten::mul"]["calls"] == 40
    assert sum(row["self_cpu_percent"] for row in found["rows"]) == pytest.approx(100)
    assert "Self CPU %" in found["table"] and "# of Calls" in found["table"]
    assert sum(k["read"] + k["written"] for k in found["ledger"]["kernels"]) == 9 * 2**19
    assert {"table.txt", "trace.json", "flame.svg", "flame.folded"} <= set(found["files"])
    assert json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]
    folded = (tmp_path / "p" / "flame.folded").read_text()
    assert any("gelu (fusewise/lab/targets/gelu.py:" in line and "aten::tanh" in line for line in folded.splitlines())
    ElementTree.parse(tmp_path / "p" / "flame.svg")


def test_a_trace_that_finds_no_room_is_told_and_no_older_one_is_read(tmp_path: Path) -> None:
    """torch reports no error there."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    arguments = ["profile", "gelu", "--case", "gelu-5x5", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "fusewise", *arguments],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"profile: the folder must have room for trace.json, got none in {tmp_path}; make room" in done.stdout


@pytest.mark.parametrize(
    ("target", "provider", "why"),
    [
        ("gelu", "lab_code_fakes:Absent", "no_such_module_anywhere is not installed"),
        ("rope", "fusewise-triton", "fusewise-triton missing: runs on cuda only, not on cpu"),
    ],
    ids=["library", "device"],
)
def test_a_provider_that_cannot_be_profiled_says_why(target: str, provider: str, why: str, tmp_path: Path) -> None:
    arguments = ["profile", target, "--provider", provider, "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1 and why in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tango"], "target must be one of rope, .*, got 'tango'; try rope or my_file.py:my_function"),
        (["gelu", "--provider", "nobody"], "providers must be among those of `fusewise providers`, got 'nobody'; "),
        # found in the function's own process
        ([f"{FUNCTIONS}:nope", "--input", "x=fp32[4]"], "nope must be defined at the top of .*, got no such name; "),
    ],
    ids=["target", "provider", "function"],
)
def test_what_names_no_problem_is_told_in_the_verbs_own_name(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["profile", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert re.search(f"Error: profile: {message}", " ".join(result.output.split()))


@pytest.mark.gpu
def test_a_profile_on_the_gpu(tmp_path: Path) -> None:
    arguments = ["profile", "gelu", "--case", "gelu-256", "--pass", "fwd", "--device", "cuda", "--out", str(tmp_path)]
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert sum(row["self_device_us"] for row in found["rows"]) > 0
    assert "flame-device.svg" in found["files"]
    folded = (tmp_path / "flame-device.folded").read_text()
    assert any("tanh" in line for line in folded.splitlines())
