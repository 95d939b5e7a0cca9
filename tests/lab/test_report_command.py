"""`fusewise report`: all output is a function of the record on disk."""

import ast
import json
import os
import subprocess
import sys

import pytest
from builders import full_record, gpu_record
from click.testing import CliRunner

from fusewise.cli import cli
from fusewise.lab import record


@pytest.fixture
def run(tmp_path):
    record.save(full_record(1), tmp_path)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def test_it_renders_anew_and_the_same(run):
    result = invoke(run)
    assert result.exit_code == 0, result.output
    assert f"report: {run / 'report.html'}" in result.output.replace("\n", "")
    assert "yes: fusewise-cpu" in result.output
    first = {name: (run / name).read_bytes() for name in ("report.html", "report.md")}
    assert invoke(run / "record.json").exit_code == 0
    assert first == {name: (run / name).read_bytes() for name in first}
    assert invoke(run, "--out", run / "elsewhere").exit_code == 0
    assert (run / "elsewhere" / "report.html").read_bytes() == first["report.html"]


def test_nothing_is_written_through_a_link(run, tmp_path):
    """The folder may belong to someone else."""
    assert invoke(run).exit_code == 0
    written = [path for path in run.iterdir() if path.suffix in (".html", ".md", ".png")]
    assert len(written) > 2
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for path in written:
        path.unlink()
        path.symlink_to(mine)
    assert invoke(run).exit_code == 0
    assert mine.read_text() == "mine"
    assert not any(path.is_symlink() for path in written)


def test_it_gives_verdicts_and_rows_as_json(run):
    found = json.loads(invoke(run, "--json").stdout)
    assert [group["pass"] for group in found] == ["fwd", "bwd"]
    assert (found[0]["worth"], found[0]["kernel"], found[0]["bound"]) == ("yes", "fusewise-cpu", "memory")
    assert found[0]["rows"][0]["id"] == "rope/cube-1/fp32/fwd/floor-copy"
    assert found[0]["sentences"][0].startswith("It is memory-bound")
    assert not (run / "report.html").exists()


def test_a_row_prints_its_program(run):
    program = invoke(run, "--script", "rope/cube-1/fp32/bwd/jax").stdout
    assert "'bwd'" in program
    ast.parse(program)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere",), 2, "does not exist"),
        (("{run}", "--script", "nope"), 2, "--script must be the id of a row, such as rope/cube-1/fp32/fwd/floor-copy"),
        (("{run}/garbage",), 2, "must be the record.json of a study"),
        (("{run}/newer",), 2, "record: schema must be 1 to"),
        (("{run}", "--out", "{run}/garbage/below"), 1, "--out must be writable"),
    ],
)
def test_what_cannot_be_done_is_told(run, arguments, code, words):
    (run / "garbage").write_text("no json")
    (run / "newer").write_text(json.dumps({**full_record(1).to_json(), "schema": 99}))
    result = invoke(*(a.format(run=run) for a in arguments))
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["environment"].update(memory_bytes="x", more_bytes=10**400),
        lambda d: d["profiles"][0]["rows"][0].pop("self_device_percent"),
        lambda d: d["rows"][1].update(case="\ud800x"),
        lambda d: d["rows"][1].update(case=f"x-{'9' * 400}"),
        lambda d: [row.update(clocks={"sm_mhz": 0}) for row in d["rows"]],
    ],
    ids=["bytes", "profile", "surrogate", "sweep", "clocks"],
)
def test_odd_values_of_a_valid_record_are_shown(change, tmp_path):
    data = gpu_record().to_json()
    change(data)
    (tmp_path / "record.json").write_text(json.dumps(data))
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.exception
    (tmp_path / "slower").mkdir()
    for row in data["rows"]:
        row.update(device_us=row["device_us"] * 2, clocks={"sm_mhz": 1000.0})
    (tmp_path / "slower" / "record.json").write_text(json.dumps(data))
    compared = CliRunner().invoke(cli, ["compare", str(tmp_path), str(tmp_path / "slower"), "--json"])
    assert json.loads(compared.stdout)["exit_code"] == 1


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_record_that_cannot_be_read_is_told(run, verb, monkeypatch):
    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(run), "read_text", broken)
    result = CliRunner().invoke(cli, [verb, str(run)] + [str(run)] * (verb == "compare"))
    assert result.exit_code == 2
    assert f"{verb}: {run} must be a file that can be read, got [Errno 5]" in result.output.replace("\n", "")


def test_a_comparison_that_is_not_read_to_its_end_found_nothing_slower(tmp_path):
    """Exit code 1 would say so."""
    record.save(full_record(1), tmp_path)
    command = [sys.executable, "-m", "fusewise", "compare", str(tmp_path), str(tmp_path)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=120).returncode == 0
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (2, "")
