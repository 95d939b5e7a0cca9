"""The machine's limits: measured, saved for this user only, and used where a group has no floor of its own."""

import json
import os

import pytest
import torch
from builders import LIMITS, measurement, row
from click.testing import CliRunner

import fusewise
from fusewise.cli import cli
from fusewise.lab import analysis, commands, limits, machine, plan, schema
from fusewise.lab.timing import Turn


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))


def test_only_tf32_products_are_measured_in_tf32(monkeypatch):
    precisions = []
    monkeypatch.setattr(
        limits, "_microseconds", lambda *_: precisions.append(torch.get_float32_matmul_precision()) or 1
    )
    monkeypatch.setitem(limits.MATMUL_SIZE, "cpu", 8)
    usual, here = torch.get_float32_matmul_precision(), torch.device("cpu")
    for dtype in ("fp32", "tf32", "bf16"):
        assert limits._matmul(None, here, dtype, torch.Generator()) == 2 * 8**3 / 1e6
        assert torch.get_float32_matmul_precision() == usual
    assert precisions == [usual, "high", usual]


def test_rates_of_memory_count_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setitem(limits.VECTOR_BYTES, "cpu", 2**20)
    monkeypatch.setattr(limits, "_microseconds", lambda *_: 10.0)
    copy, triad = limits._vectors(None, torch.device("cpu"), torch.Generator())
    assert (copy, triad) == pytest.approx((2 * 2**20 / 10e-6 / 1e9, 3 * 2**20 / 10e-6 / 1e9))


@pytest.mark.parametrize(("seconds", "samples"), [((0.6, 0.7, 0.6), 1), ((0.9, 0.9, 0.1), limits.SAMPLES)])
def test_a_slow_call_is_sampled_once(seconds, samples):
    """The first calls of a fast one may be slow."""

    left = iter(seconds)

    class Timer:
        once = staticmethod(lambda _: next(left))
        turn = staticmethod(lambda _, samples, calls: Turn([samples, samples, 99.0, 0.0, samples]))

    assert limits._microseconds(Timer, None) == samples


def test_measured_limits_are_sane_and_kept(monkeypatch):
    monkeypatch.setitem(limits.VECTOR_BYTES, "cpu", 2**22)
    monkeypatch.setitem(limits.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setattr(limits.machine, "cache_bytes", lambda _: 2**20)
    result = CliRunner().invoke(cli, ["limits", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0.05 < found["copy_gb_s"] < 1e4
    assert 0.05 < found["triad_gb_s"] < 1e4
    assert 0 < found["launch_us"] < 1e4
    assert set(found["matmul_tflop_s"]) == {"fp32", "bf16", "fp16"}
    assert all(0 < rate < 1e3 for rate in found["matmul_tflop_s"].values())
    assert set(found["clocks"] or {}) == ({"waiting_threads"} if machine.waited_s() is not None else set())
    assert limits.kept("cpu") == found
    file = limits.path("cpu")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    shown = CliRunner().invoke(cli, ["limits", "--device", "cpu", "--kept"])
    assert shown.exit_code == 0
    assert "triad" in shown.stdout
    known = schema.schema()
    pytest.importorskip("jsonschema").validate(found, {**known, **known["$defs"]["limits"]})


def test_nothing_kept_is_told():
    assert limits.kept("cpu") is None
    result = CliRunner().invoke(cli, ["limits", "--device", "cpu", "--kept"])
    assert result.exit_code == 1
    assert "none are kept for cpu; run `fusewise limits --device cpu`" in result.output


def test_they_are_measured_in_another_process(tmp_path, monkeypatch):
    log = tmp_path / "limits.log"
    assert limits.measure_apart("cuda:99", log, 60) is None  # without a GPU, or with fewer
    assert "limits: device must" in log.read_text()
    python, program = limits.sys.executable, tmp_path / "python"
    monkeypatch.setattr(limits.sys, "executable", str(program))
    assert limits.measure_apart("cpu", log, 60) is None  # no such program
    assert "No such file" in log.read_text()
    program.write_text(f"#!{python}\nimport sys\nfrom fusewise.lab import limits\n"
                       f"limits.keep({LIMITS}, sys.argv[-1])\n")  # fmt: skip
    program.chmod(0o755)
    assert limits.measure_apart("cpu", log, 0.01) is None
    assert "timed out" in log.read_text()
    assert limits.measure_apart("cpu", log, 60) == LIMITS


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "nonsense", json.dumps({**LIMITS, "copy_gb_s": "fast"}), json.dumps({**LIMITS, "launch_us": -1.0}),
     json.dumps({**LIMITS, "matmul_tflop_s": {"fp32": None}}), json.dumps({**LIMITS, "matmul_tflop_s": 3}),
     json.dumps({**LIMITS, "copy_gb_s": float("inf")}), json.dumps({**LIMITS, "clocks": {"sm_mhz": "high"}})],
)  # fmt: skip
def test_a_file_that_is_not_ours_counts_as_none(content):
    limits.keep(LIMITS, "cpu")
    assert limits.kept("cpu") == LIMITS
    limits.path("cpu").write_text(content)
    assert limits.kept("cpu") is None


def test_a_file_that_others_could_write_counts_as_none():
    limits.keep(LIMITS, "cpu")
    os.chmod(limits.path("cpu"), 0o666)
    assert limits.kept("cpu") is None


def test_a_user_without_a_place_for_them_has_none_and_is_told(monkeypatch):
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", "/proc/fusewise")
    assert limits.kept("cpu") is None
    monkeypatch.setattr(limits, "measure", lambda _: LIMITS)
    result = CliRunner().invoke(cli, ["limits", "--device", "cpu"])
    assert result.exit_code == 1
    assert "limits: not kept" in result.output and "copy" in result.output  # they are printed all the same
    assert "FUSEWISE_CACHE_DIR" in result.output


def test_another_build_or_thread_count_has_limits_of_its_own(monkeypatch):
    limits.keep(LIMITS, "cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert limits.kept("cpu") is None


def test_they_give_shares_where_a_run_has_no_floors():
    rows, _ = analysis.group_rows([row("eager")], [measurement("eager", [[16.0]] * 4)], LIMITS)
    assert (rows[0].limit, rows[0].share_of_limit) == ("copy", pytest.approx(0.5))  # 8 MB at 1000 GB/s: 8 µs
    rows, _ = analysis.group_rows([row("eager", flops_min=32_000_000)], [measurement("eager", [[64.0]] * 4)], LIMITS)
    assert (rows[0].limit, rows[0].share_of_limit) == ("matmul", pytest.approx(0.5))
    small = [row("eager", bytes_min=1000)]
    rows, _ = analysis.group_rows(small, [measurement("eager", [[4.0]] * 4)], LIMITS)
    assert (rows[0].limit, rows[0].share_of_limit) == ("launch", pytest.approx(0.5))


def test_a_floor_of_the_run_counts_before_them():
    pair = [measurement("eager", [[40.0]] * 4), measurement("floor-copy", [[20.0]] * 4)]
    rows, _ = analysis.group_rows([row("eager"), row("floor-copy", error=None)], pair, LIMITS)
    assert (rows[0].limit, rows[0].share_of_limit) == ("copy", pytest.approx(0.5))


NO_SHARE = (
    "study: providers must have a floor where no limits of the machine are kept, got none, so no share of a limit can be "
    "told; add floor-copy,floor-launch to the providers, or run `fusewise limits --device cpu` first\n"
)


@pytest.fixture
def unmeasured(monkeypatch):
    """A study that measures nothing, for the messages before it."""
    monkeypatch.setattr(commands.Study, "run", lambda self: self.record)


@pytest.mark.parametrize(
    ("providers", "kept", "told"),
    [
        (["eager", "torch.compile"], False, True),
        (["eager", "torch.compile"], True, False),
        (["eager", "floor-launch"], False, False),
        (["eager", "floor-triton-launch"], False, True),  # a host floor, which is no limit
        (None, False, False),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_study_that_can_tell_no_share_says_so_first(providers, kept, told, flags, unmeasured, tmp_path):
    if kept:
        limits.keep(LIMITS, "cpu")
    named = [] if providers is None else ["--providers", ",".join(providers)]
    asked = ["study", "rope", "--case", "cube-4", "--device", "cpu", "--out", str(tmp_path / "run"), *named, *flags]
    result = CliRunner().invoke(cli, asked)
    assert (NO_SHARE in result.stderr) == told, result.stderr
    assert "add floor-copy" not in result.stdout
    if flags:
        assert json.loads(result.stdout) == []


def test_one_from_python_says_so_too(unmeasured, tmp_path, capsys):
    fusewise.study(torch.sigmoid, torch.randn(8), providers=["eager"], out=tmp_path / "a", code=False)
    assert capsys.readouterr().err == NO_SHARE
    fusewise.study(torch.sigmoid, torch.randn(8), providers=["eager", "floor-copy"], out=tmp_path / "b", code=False)
    assert capsys.readouterr().err == ""


def test_of_many_ranks_one_says_so(unmeasured, tmp_path, capsys):
    for first in (True, False):
        options = plan.options(
            plan.Request(target="gelu", cases=["gelu-5x5"], providers=["eager"], device="cpu"), tmp_path / str(first)
        )
        commands.run(options, alone=first)
        assert (NO_SHARE in capsys.readouterr().err) == first


@pytest.mark.gpu
def test_a_gpu_is_near_what_it_is_known_for():
    found = limits.measure("cuda:0")
    assert found["copy_gb_s"] > 200
    assert found["matmul_tflop_s"]["bf16"] > 2 * found["matmul_tflop_s"]["fp32"]
    assert 0.5 < found["launch_us"] < 20
