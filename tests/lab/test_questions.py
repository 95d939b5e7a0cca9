"""docs/questions.md matches the published rows: regenerating it changes nothing, and its figures match independent
calculations.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from builders import row

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "questions.py"
PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def questions():
    spec = importlib.util.spec_from_file_location("questions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_group(name):
    """(case, dtype, pass) -> provider -> its row, of the latest run with torch.compile, read from the file directly."""
    found = {}
    for line in (ROOT / "benchmarks" / "baselines" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        if data["status"] == "ok" and data["op"] == "rope":
            place = found.setdefault((data["case"], data["dtype"], data["pass"]), {})
            place.setdefault(data["run"], {})[data["provider"]] = data
    kept = {key: [run for run in sorted(runs) if "torch.compile" in runs[run]] for key, runs in found.items()}
    return {key: found[key][runs[-1]] for key, runs in kept.items() if runs}


def test_the_page_is_what_the_rows_and_the_ledgers_make_of_it(tmp_path):
    made = tmp_path / "questions.md"
    subprocess.run([sys.executable, SCRIPT, made], check=True, timeout=300, capture_output=True)
    assert made.read_text(encoding="utf-8") == PAGE, "the rows have changed: run python benchmarks/questions.py"


def three(value):
    """Three significant digits, including zeros."""
    return f"{value:#.3g}".removesuffix(".")


@pytest.mark.parametrize(("pass_", "word"), [("fwd", "Forward"), ("bwd", "Backward")])
def test_ratios_of_device_times_by_hand(pass_, word):
    ratios = []
    for (case, _, of), group in by_group("h200").items():
        ours = [group[p]["device_us"] for p in ("fusewise-triton", "fusewise-cuda") if p in group]
        if case.endswith("-train") and of == pass_ and ours and "eager" in group:
            ratios.append(group["eager"]["device_us"] / min(ours))
    line = next(line for line in PAGE.splitlines() if line.startswith(f"{word}, "))
    assert f"{word}, {len(ratios)} models" in line
    assert f"takes {three(min(ratios))} to {three(max(ratios))}, median {three(median(ratios))} times" in line


def test_who_waits_for_the_host_by_hand():
    compilers = {"eager", "torchscript", "torch.compile", "thunder", "jax", "tvm", "fusewise-reference"}
    groups = {k: g for k, g in by_group("h200").items() if k[2] == "fwd"}
    served = {k: g for k, g in groups.items() if "-serve-" in k[0]}
    groups = served or {k: g for k, g in groups.items() if not k[0].startswith("width")}
    waiting, calls = 0, []
    for group in groups.values():
        call = {p: max(r["device_us"], r["host_us"]) for p, r in group.items() if not p.startswith("floor-")}
        compiled = group["torch.compile"]
        if compiled["host_us"] > compiled["device_us"]:
            waiting += 1
            calls.append(
                call["torch.compile"]
                / min(t for p, t in call.items() if p.partition("-")[0] not in compilers and p not in compilers)
            )
    assert f"In {waiting} of {len(groups)} comparisons torch.compile is limited by host overhead" in PAGE
    assert f"as a call {three(min(calls))} to {three(max(calls))} times as long (median {three(median(calls))})" in PAGE


def test_what_eager_code_takes_beyond_a_copy_by_hand():
    group = by_group("h200")["llama-3-8b-train", "bf16", "fwd"]
    copy, eager, compiled = (group[p]["device_us"] for p in ("floor-copy", "eager", "torch.compile"))
    assert f"takes {three(compiled / copy)} times as long as a copy of those bytes ({copy:.1f} µs)" in PAGE
    assert f"Eager code takes {three(eager / copy)} times the copy" in PAGE


def test_of_several_runs_the_latest_that_has_the_rivals_counts(questions):
    rows = [
        row("torch.compile", device_us=9.0, run="20260101T000000-a"), row("eager", device_us=20.0, run="20260101T000000-a"),
        row("torch.compile", device_us=8.0, run="20260201T000000-b"), row("eager", device_us=19.0, run="20260201T000000-b"),
        row("fusewise-cuda", device_us=4.0, run="20260301T000000-c"),  # alone: no comparison
        row("torch.compile", "failed", run="20260401T000000-d"),
    ]  # fmt: skip
    ((group),) = questions.latest(rows).values()
    assert {name: r.device_us for name, r in group.items()} == {"torch.compile": 8.0, "eager": 19.0}
    assert questions.latest(rows, ("liger",)) == {}


def constructed(questions, extra=()):
    names = {
        "floor-copy": 10.0,
        "floor-launch": 2.0,
        "eager": 60.0,
        "torch.compile": 12.0,
        "fusewise-triton": 11.0,
        "vllm": 30.0,
    }
    cases = ["llama-3-8b-train", "llama-3-8b-decode-b1", *extra]
    rows = [
        row(name, case=case, device_us=us, host_us=us / 2, run="20260101T000000-a", versions={"torch": "2.11.0"})
        for case in cases
        for name, us in names.items()
    ]
    return questions.page(rows, [row("eager", device_us=1.0, run="20260101T000000-b", versions={"torch": "2.11.0"})],
                          lambda op, case, dtype: (3.0, 7, 1.5))  # fmt: skip


def test_a_constructed_page_has_the_constructed_figures(questions):
    page = constructed(questions)
    assert "eager code takes 5.45 to 5.45, median 5.45 times as long" in page
    assert "runs 7 kernels, which move 3.00 times" in page and "compiled for a GPU, 1.50 times." in page
    assert (
        "Its bytes explain a factor of 3.00; the rest is that its kernels run at 50 % of the copy's bandwidth" in page
    )
    assert (
        "In 2 of 2 comparisons torch.compile is limited by the device: torch.compile takes 1.09 times the device time"
        in page
    )


def test_what_was_not_measured_is_said_until_it_is(questions):
    before, after = constructed(questions), constructed(questions, ["seqlen-512", "llama-3-8b-serve-decode-b1"])
    for command in ("study rope-seqlen", "study rope-serving"):
        assert command in before and command not in after
    assert "study gelu-sizes" in after


def test_gelu_over_its_sizes_and_rows_of_other_operations_apart(questions):
    times = {"gelu-5x5": (2.0, 1.0), "gelu-4096": (2.0, 40.0)}
    rows = [
        row(
            name,
            op="gelu",
            case=case,
            device_us=us,
            run="20260101T000000-a",
            bytes_min=bytes_,
            versions={"torch": "2.11.0"},
        )
        for case, bytes_, (launch, copy) in zip(times, (200, 2**27), times.values(), strict=True)
        for name, us in {
            "floor-launch": launch,
            "floor-copy": copy,
            "eager": 9 * copy,
            "torch.compile": 1.25 * copy,
        }.items()
    ]
    rows += [
        row(name, op="qk_norm_rope", case="other-train", device_us=us, host_us=1.0, run="20260101T000000-a",
            versions={"torch": "2.11.0"})
        for name, us in {"floor-copy": 1.0, "eager": 990.0, "torch.compile": 2.0, "fusewise-triton": 1.0}.items()
    ]  # fmt: skip
    page = questions.page(rows, rows, lambda op, case, dtype: (3.0, 7, 1.5))
    assert "From gelu-4096 on (128 MiB) a copy takes more than twice as long as launching a kernel" in page
    assert "At the largest size, eager code takes 9.00 times the copy, torch.compile 1.25 times." in page
    assert "study gelu-sizes" not in page and "other-train" not in page and "990" not in page
