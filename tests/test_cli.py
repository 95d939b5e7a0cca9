import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

click = pytest.importorskip("click")

from click.shell_completion import ShellComplete  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import fusewise  # noqa: E402
from fusewise.cli import cli  # noqa: E402
from fusewise.lab.targets import BUILT_IN  # noqa: E402


def invoke(*arguments):
    return CliRunner().invoke(cli, arguments)


def test_version_and_help():
    assert fusewise.__version__ in invoke("--version").output
    top, study = invoke("--help").output, invoke("study", "-h").output
    assert "study" in top
    assert "..." not in top.partition("Commands:")[2]  # no help text is truncated
    assert "providers" in top
    for text in ("Exit codes:", "130", "Examples:", "fusewise study rope --preset rope-models", "--append-rows"):
        assert text in study
    assert f"TARGET is {', '.join(BUILT_IN)}, one of" in " ".join(study.split())


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_verb_has_examples_and_exit_codes(verb):
    shown = invoke(verb, "--help").output
    assert f"Examples:\n    fusewise {verb}" in shown
    assert "Exit codes:\n    0" in shown


def test_list_shows_presets_and_cases():
    plain = invoke("study", "rope", "--list")
    assert plain.exit_code == 0
    assert "rope-quick" in plain.output
    assert "llama-3-8b-train" in plain.output
    listing = json.loads(invoke("study", "rope", "--list", "--json").output)
    assert {"rope-cube", "rope-seqlen", "rope-models", "rope-quick"} <= {entry["preset"] for entry in listing}
    assert len([e for e in listing if e["preset"] == "rope-cube"]) == 31
    everything = json.loads(invoke("study", "--list", "--json").output)
    assert listing == [entry for entry in everything if entry["preset"].startswith("rope")]
    assert {"gelu-sizes", "geglu-quick", "mlp-models", "cache-quick"} <= {entry["preset"] for entry in everything}


@pytest.mark.parametrize("verb", ["study", "code", "profile"])
def test_a_shell_completes_targets_and_files(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("geo.py", "notes.txt", "models/deep.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    argument = next(p for p in cli.commands[verb].params if p.name == "target")

    def completed(incomplete):
        return [(item.type, item.value) for item in argument.shell_complete(None, incomplete)]

    assert completed("ge") == [("plain", "geglu"), ("plain", "gelu"), ("plain", "geo.py")]
    assert completed("models/") == [("plain", "models/deep.py")]
    assert [completed(text) for text in ("mod", "no/such")] == [[("file", "mod")], [("file", "no/such")]]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("study gelu --preset g", "gelu-quick gelu-sizes"),
        ("study rope --case llama-3-8b-t", "llama-3-8b-train"),
        ("study gelu-sizes --case gelu-16", "gelu-16 gelu-16384"),
        (
            "study rope --providers eager,fusewise-cpu",
            "eager,fusewise-cpu eager,fusewise-cpu-inplace eager,fusewise-cpu-recompute",
        ),
        ("code gelu --provider torchs", "torchscript"),
        ("profile gelu --case gelu-4", "gelu-4096"),
        ("profile gelu --provider tv", "tvm"),
        ("tune g", "geglu"),
        ("tune geglu --preset geglu-m", "geglu-memory geglu-models"),
        ("tune geglu --case llama-3-8b-t", "llama-3-8b-train"),
        ("study my.py:f --preset g", ""),
        ("study nothing --case g", ""),
    ],
)
def test_a_shell_completes_names(line, found):
    *words, begun = line.split()
    items = ShellComplete(cli, {}, "fusewise", "_FUSEWISE_COMPLETE").get_completions(words, begun)
    assert [item.value for item in items] == found.split()


def test_a_function_s_listing_has_no_preset_and_nothing_that_a_terminal_would_interpret(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(x):\n    return x\n")
    listed = invoke("study", f"{file}:f", "--input", "fp32[8,8]", "--input", '"a\x1b\nb"', "--list").output
    assert listed.split()[:4] == ["fp32[8,8]", '"a\ufffd', 'b"', "fp32"] and listed.count("\n") == 1


def test_providers_lists_what_is_missing():
    found = {e["provider"]: e for e in json.loads(invoke("providers", "--device", "cpu", "--json").output)}
    assert found["eager"]["state"] == "here"
    assert found["eager"]["versions"]["torch"]
    assert found["fusewise-triton"]["state"] == "missing"
    assert "fusewise-triton" in invoke("providers", "--device", "cpu").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("study", "tango"),
            "study: target must be one of rope, geglu, gelu, qk_norm_rope, rope_and_cache, gated_mlp, got 'tango'; try rope or my_file.py:my_function",
        ),
        (("study", "rope", "--preset", "nope"), "preset must be one of rope-cube"),
        (("study", "tango", "--list"), "target must be one of rope"),
        (("study",), "a target must be given, got none; try `fusewise study rope`, or --list for all"),
        (("study", "--list", "--case", "cube-4"), "--list without a target must be alone"),
        (("study", "no_such_file.py:f", "--list"), "must be in a file that exists"),
        (("study", "rope", "--input", "x=fp32[4]"), "inputs must be those of a function, got target 'rope'"),
        (("study", "rope", "--case", "nope"), "name must be that of a case"),
        (("study", "rope", "--preset", "rope-cube", "--case", "cube-4"), "give --preset or --case, got both"),
        (("study", "rope", "--dtype", "int8"), "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        (("study", "rope", "--dtype", ""), "dtype must be one of fp32, bf16, fp16, got none"),
        (("study", "rope", "--out", ""), "it must have a name, or be left out"),
        (("code", "gelu", "--out", ""), "it must have a name, or be left out"),
        (("profile", "gelu", "--out", ""), "it must have a name, or be left out"),
        (("report", str(Path(__file__).parent), "--out", ""), "it must have a name, or be left out"),
        (("tune", "geglu", "--list", "--dtype", ""), "dtype must be one name at least, got none"),
        (("tune", "geglu", "--list", "--epilogue", ","), "epilogue must be one name at least, got none"),
        (("study", "rope", "--list", "--preset", "nope"), "preset must be one of rope-cube"),
        (("study", "rope", "--list", "--case", "nope"), "name must be that of a case"),
        (("study", "rope", "--pass", "fwd", "--pass=bwd"), "Error: study: --pass must be given once, got it 2 times; "),
        (("profile", "rope", "--provider", "jax", "--provider", "tvm"), "profile: --provider must be given once"),
        (("build", "--arch", ","), "arch must be names like sm_80,sm_90, got none"),
        (("study", "rope", "--pass", "sideways"), "pass must be one of fwd, bwd, fwd+bwd, both, got 'sideways'"),
        (
            ("study", "rope", "--case", "llama-3-8b-decode-b1", "--pass", "bwd"),
            "pass must be one that the cases have, fwd, got 'bwd'; choose one",
        ),
        (("study", "rope", "--device", "toaster"), "device must be cpu or cuda[:index], got 'toaster'"),
        (("study", "rope", "--device", "cuda:99"), "got 'cuda:99'; try --device cpu"),
        (("study", "rope", "--rounds", "many"), "'many' is not MIN:MAX"),
        (("study", "rope", "--rounds", "9:4"), "rounds must be MIN:MAX with 3 <= MIN <= MAX, got 9:4"),
        (("study", "rope", "--providers", "nosuch"), "providers must be among"),
        (("study", "rope", "--time-limit", "-1"), "--time-limit"),
        (
            ("study", "rope", "--time-limit", "nan"),
            "time_limit must be a finite number of seconds, at least 0, got nan",
        ),
        (("study", "rope", "--timeout", "inf"), "timeout must be a finite number of seconds, at least 0, got inf"),
        (
            ("study", "rope", "--memory-limit", "inf"),
            "memory_limit must be a finite number of GiB, at least 0, got inf",
        ),
        (("study", "rope", "--memory-limit", "1e308"), "memory_limit must be a finite number of GiB"),
        (("study", "rope", "--seed", str(2**64)), "seed must fit into 64 bits"),
        (("study", "rope", "--providers", ","), "providers must be one name at least, got none"),
        (("study", "rop"), "got 'rop'; try 'rope'"),
        (("study", "my_file.py"), "got 'my_file.py'; try my_file.py:my_function"),
        (("study", "layers.py"), "got 'layers.py'; try layers.py:my_function"),
        (("study", "rope", "--providers", "egaer"), "got 'egaer'; try 'eager'"),
        (("study", "rope", "--preset", "rope-kube"), "got 'rope-kube'; try 'rope-cube'"),
        (("study", "rope", "--case", "llama-3-8b-trian"), "got 'llama-3-8b-trian'; try 'llama-3-8b-train'"),
        (("providers", "--device", "tpu"), "providers: device must be cpu or cuda[:index], got 'tpu'"),
        (("limits", "--device", "cuda:99"), "limits: device must be one of"),
        (("tune", "geglu", "--device", "tpu", "--list"), "tune: device must be cpu or cuda[:index], got 'tpu'"),
    ],
)
def test_bad_command_lines_exit_2_with_a_fix(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("study", "gelu", "--device", "cpu"), "plan.options"),
        (("code", "gelu", "--device", "cpu"), "plan.options"),
        (("limits", "--device", "cpu"), "limits.measure"),
        (("providers",), "commands.provider_states"),
    ],
)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_exits_130_wherever_it_comes(arguments, where, end, monkeypatch):
    def interrupted(*_):
        signal.raise_signal(end)

    module, name = where.split(".")
    monkeypatch.setattr(importlib.import_module(f"fusewise.lab.{module}"), name, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    try:
        result = invoke(*arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_hangup_that_nohup_ignores_ends_nothing(monkeypatch):
    def seen(*_):
        signal.raise_signal(signal.SIGHUP)
        raise ValueError("still here")

    monkeypatch.setattr(importlib.import_module("fusewise.lab.plan"), "options", seen)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = invoke("study", "gelu", "--device", "cpu")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.exit_code == 2 and "still here" in result.stderr


@pytest.mark.parametrize("command", [["-m", "fusewise"], ["fusewise"]])
def test_an_interruption_of_the_imports_is_quiet(command, tmp_path):
    """Even if a library swallows the exception during its import."""
    (tmp_path / "fusewise").write_text("from fusewise.__main__ import main\nmain()\n")  # like pip's script
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "click.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    path = [str(tmp_path / "libraries"), str(Path(fusewise.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, *command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_terminal_obeys_nothing_that_a_function_raises(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(x):\n    raise ValueError('\\x1b[2J\\x00 no')\n")
    result = invoke("study", f"{file}:f", "--input", "fp32[8]", "--device", "cpu")
    assert result.exit_code == 2
    assert "got ValueError: \ufffd[2J\ufffd no; run it by hand" in result.output
    assert "\x1b" not in result.output


def test_an_unwritable_directory_exits_1(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    result = invoke("study", "rope", "--case", "cube-4", "--out", str(file / "below"), "--device", "cpu")
    assert result.exit_code == 1
    assert "run directory must be writable" in result.output


def test_rows_that_cannot_be_added_are_told_before_anything_is_measured(tmp_path):
    file, out = tmp_path / "file", tmp_path / "run"
    file.write_text("")
    rows = ("--append-rows", str(file / "rows.jsonl"))
    result = invoke("study", "rope", "--case", "cube-4", "--out", str(out), "--device", "cpu", *rows)
    assert result.exit_code == 1
    assert "--append-rows must be a file to write to" in result.output
    file.write_text('{"kind": "fusewise.record"}')
    result = invoke(
        "study", "rope", "--case", "cube-4", "--out", str(out), "--device", "cpu", "--append-rows", str(file)
    )
    assert result.exit_code == 1
    assert "--append-rows must be a file of rows, got record: line 1 of" in " ".join(result.output.split())
    for own in ("record.json", "../run/rows.jsonl", "report.md"):
        rows = ("--append-rows", str(out / own))
        result = invoke("study", "rope", "--case", "cube-4", "--out", str(out), "--device", "cpu", *rows)
        assert result.exit_code == 1
        assert "--append-rows must be a file other than those that the study writes" in " ".join(result.output.split())
    assert not out.exists()


def test_a_study_that_is_resumed_once_it_is_done_adds_no_row_twice(tmp_path):
    rows = tmp_path / "rows.jsonl"
    asked = "study gelu --case gelu-5x5 --pass fwd --device cpu --rounds 3:3 --warm --no-code --providers eager"
    asked = [*asked.split(), "--out", str(tmp_path / "run"), "--append-rows", str(rows)]
    assert invoke(*asked).exit_code == 0
    once = rows.read_text()
    assert invoke(*asked, "--resume").exit_code == 0
    assert rows.read_text() == once and once.count("\n") == 1
    rows.unlink()  # missing rows are added
    assert invoke(*asked, "--resume").exit_code == 0
    assert rows.read_text() == once


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_rows_for_a_full_disk_are_told_by_their_file(tmp_path):
    command = "study gelu --case gelu-5x5 --pass fwd --device cpu --rounds 3:3 --warm --no-code --providers eager"
    out = tmp_path / "run"
    result = invoke(*command.split(), "--out", str(out), "--append-rows", "/dev/full")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert (
        "study: --append-rows must be a file with room, got [Errno 28] No space left on device for /dev/full; the"
        in said
    )
    assert f"the study is done, add {out / 'rows.jsonl'}" in said
    assert json.loads((out / "record.json").read_text())["finished"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_for_what_is_printed_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fusewise", "study", "rope", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "Error: what is to be printed must find room, got [Errno 28] No space left on device; "
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--list"], ["--list", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fusewise", "study", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_study_needs_no_standard_streams(tmp_path):
    """A service may start it with all of them closed: the files that it opens must not get their numbers."""
    words = "-m fusewise study gelu --case gelu-5x5 --pass fwd --device cpu --rounds 3:3 --no-code --providers eager"
    command = [sys.executable, *words.split(), "--out", str(tmp_path)]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False, timeout=300)
    assert done.returncode == 0
    assert [row["status"] for row in json.loads((tmp_path / "record.json").read_text())["rows"]] == ["ok"]


def test_a_whole_small_study(tmp_path):
    """A newcomer's path, from command line to report; on the CPU, without compilers for speed."""
    out, published = tmp_path / "run", tmp_path / "published" / "cpu.jsonl"
    command = "study rope --case cube-8 --pass both --device cpu --rounds 3:4 --json"
    names = "floor-copy,floor-launch,eager,torchscript,fusewise-reference,liger"
    result = invoke(*command.split(), "--providers", names, "--out", str(out), "--append-rows", str(published))
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 12
    ok = [r for r in rows if r["status"] == "ok"]
    assert {r["provider"] for r in ok} == set(names.split(",")) - {"liger"}
    assert all(r["device_us"] > 0 for r in ok)
    assert all(r["error"] <= 1e-6 for r in ok if not r["provider"].startswith("floor-"))
    assert {r["verdict_vs_best_other"] for r in ok} <= {None, "faster", "slower", "same", "ambiguous"}
    assert all(r["limit"] in ("copy", "launch") and r["share_of_limit"] > 0 for r in ok)
    reference = [r for r in ok if r["provider"] == "fusewise-reference"]
    assert {r["pass"]: r["held_bytes"] for r in reference} == {"fwd": None, "bwd": 0}
    assert {p.name for p in out.iterdir()} >= {"record.json", "rows.jsonl", "report.md", "report.html", "logs"}
    report = (out / "report.md").read_text()
    assert "cube-8 · fp32 · bwd" in report
    assert "runs on cuda only" in report
    made = json.loads((out / "record.json").read_text())
    assert {entry["provider"] for entry in made["ledgers"]} == {"eager", "torchscript", "fusewise-reference"}
    assert {"eager", "torchscript"} <= {stage["provider"] for stage in made["code"]}
    assert "Fusion can save up to" in (out / "report.html").read_text()
    assert [json.loads(line) for line in published.read_text().splitlines()] == rows
    assert f"report: {out / 'report.html'}" in result.stderr


@pytest.mark.parametrize(("providers", "code"), [("floor-copy", 0), ("floor-copy,liger", 1), ("thunder-nvfuser", 1)])
def test_a_study_that_measured_nobody_exits_1(providers, code, tmp_path):
    command = "study gelu --case gelu-5x5 --pass fwd --device cpu --rounds 3:3 --warm --no-code --json"
    result = invoke(*command.split(), "--providers", providers, "--out", str(tmp_path / "run"))
    assert result.exit_code == code, result.output
    rows = json.loads(result.stdout)
    assert [row["status"] for row in rows] == [
        "ok" if n.startswith("floor") else "missing" for n in providers.split(",")
    ]
    told = "study: a provider must be right and have a time, got none; the rows have the reasons"
    assert (told in " ".join(result.stderr.split())) == bool(code)


def test_without_the_extra_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['click'] = None; sys.argv = ['fusewise']; from fusewise.__main__ import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fusewise.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.strip() == "fusewise: click is not installed; pip install 'fusewise[lab]'"


def test_without_the_extra_study_says_what_to_install():
    code = "import sys; sys.modules['rich'] = None; import fusewise; fusewise.study"
    environment = {**os.environ, "PYTHONPATH": str(Path(fusewise.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stderr.strip().endswith("; pip install 'fusewise[lab]'")


def test_resume_needs_a_run_to_go_on_with():
    result = invoke("study", "gelu", "--case", "gelu-5x5", "--resume")
    assert result.exit_code == 2
    assert "study: --resume must come with --out, the run to go on with, got none; add --out" in result.output


def test_a_named_provider_that_is_missing_is_not_left_out_without_a_word(tmp_path):
    asked = "study gelu --case gelu-5x5 --pass fwd --rounds 3 --no-code --device cpu --providers eager,liger --out"
    result = invoke(*asked.split(), str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "gelu-5x5 fp32 fwd: liger missing: " in result.output
