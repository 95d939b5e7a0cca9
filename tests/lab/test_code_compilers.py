"""The real compilers on 5 × 5 elements, each in its own process: all stages, the traffic ledger, and the index."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fusewise.cli import cli
from fusewise.lab import inside, machine, plugin, targets
from fusewise.lab.code import capture
from fusewise.lab.ledger import Ledger
from fusewise.lab.nursery import Nursery
from fusewise.lab.problem import Task

GELU = Task("gelu", "gelu-5x5", "fp32", "fwd", "cpu", 0)
#: Stages that each compiler must produce, in this order, possibly among others.
STAGES = {
    "eager": ["source", "bytecode", "aten"],
    "torchscript": ["source", "torchscript", "torchscript-optimised"],
    "torch.compile": [
        "source", "bytecode", "fx", "dynamo-bytecode", "aten", "cpp", "wrapper", "triton", "ttir", "ttgir", "llir", "ptx",
        "sass",
    ],
    "thunder": ["source", "thunder", "thunder"],
    "jax": ["stablehlo", "hlo"],
    "tvm": ["relax", "tir", "llvm", "assembly", "tir", "cuda"],
}  # fmt: skip


def entry(name: str, op: str = "gelu") -> plugin.Entry:
    return plugin.select([name], op, "cpu")[0]


Asked = tuple[list[dict[str, Any]], Ledger, Path]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Imports torch once for the providers' processes."""
    with closing(Nursery(tmp_path_factory.mktemp("nursery") / "log.txt", modules=inside.MODULES)) as one:
        yield one


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Callable[..., Asked]:
    """Stages, ledger and folder of a provider, from one process each; skips if the compiler is not installed."""

    @functools.cache
    def once(name: str, *key: str) -> Asked:
        op, case, dtype, pass_, device = key
        task = Task(op, case, dtype, pass_, device, 0)  # type: ignore[arg-type]
        out = tmp_path_factory.mktemp("code")
        requests: list[dict[str, Any]] = [
            {"do": "stages", "task": task.to_json(), "target": "sm_90", "folder": str(out / name)},
            {"do": "traffic", "task": task.to_json(), "target": "sm_90"},
        ]
        stages, traffic = capture.ask(entry(name, op), requests, out / "log.txt", timeout=300, nursery=nursery)
        if stages.status == "missing":
            pytest.skip(stages.reason)
        assert stages.status == traffic.status == "ok", (stages.reason, traffic.reason)
        return stages.found["stages"], Ledger.from_json(traffic.found["ledger"]), out

    return lambda name, task=GELU: once(name, task.op, task.case, task.dtype, task.pass_, task.device)


def is_subsequence(wanted: list[str], of: list[str]) -> bool:
    names = iter(of)
    return all(name in names for name in wanted)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_of_every_compiler(name: str, asked: Callable[..., Asked]) -> None:
    stages, ledger, folder = asked(name)
    assert is_subsequence(STAGES[name], [s["stage"] for s in stages]), [s["stage"] for s in stages]
    assert [s["order"] for s in stages] == list(range(len(stages)))
    for stage in stages:
        text = (folder / stage["file"]).read_text()
        assert text.strip() and str(Path(torch.__file__).parents[1]) not in text, stage["file"]
        assert all(1 <= int(line) <= len(text.splitlines()) for line in stage["lines"]), stage["file"]
    # Some stage below the source has a line that maps to the formula's own line.
    assert name in ("tvm",) or any("targets/gelu.py" in place for s in stages[1:] for place in s["lines"].values())
    # Fused: one read and one write. Operator by operator: eight kernels, one of which reads three tensors' worth.
    assert ledger.bytes_min == 200
    if name in ("torch.compile", "jax", "tvm"):
        assert [(k.read, k.written) for k in ledger.kernels] == [(100, 100)]
    else:
        assert ledger.bytes == 9 * 200 and len(ledger.kernels) == 8


def test_inductors_kernel_for_a_gpu_that_is_not_here(asked: Callable[..., Asked]) -> None:
    stages, _, folder = asked("torch.compile")
    by_name = {s["stage"]: s for s in stages}
    assert by_name["cpp"]["target"] == "cpu" and by_name["sass"]["target"] == "sm_90"
    counts = by_name["sass"]["counts"]
    assert counts["LDG.32"] == 1 and counts["STG.32"] == 1 and counts["registers"] > 0
    assert "tl.store(" in (folder / by_name["triton"]["file"]).read_text()
    # The machine code maps to the line of the function, the only thing this kernel computes.
    sass = (folder / by_name["sass"]["file"]).read_text().splitlines()
    load = next(n for n, line in enumerate(sass, start=1) if "LDG" in line)
    formula = by_name["fx"]["lines"]
    assert by_name["sass"]["lines"][str(load)] in set(formula.values())


@pytest.mark.parametrize(
    ("name", "op", "case", "dtype", "pass_"),
    [
        ("fusewise-triton", "rope", "cube-8", "fp32", "fwd"),
        ("fusewise-triton", "rope", "cube-8", "bf16", "bwd"),
        ("fusewise-triton", "geglu", "gemma-2b-decode-b1", "bf16", "fwd"),
        ("fusewise-gluon", "geglu", "quick-square", "bf16", "fwd"),
    ],
)
def test_our_kernels_move_what_the_mathematics_needs(
    asked: Callable[..., Asked], name: str, op: str, case: str, dtype: str, pass_: Any
) -> None:
    stages, ledger, _ = asked(name, Task(op, case, dtype, pass_, "cpu", 0))
    assert is_subsequence(["source", "ttgir", "llir", "ptx", "sass"], [s["stage"] for s in stages])
    assert ledger.bytes == ledger.bytes_min and len(ledger.kernels) == 1


def test_backward_of_a_compiled_function(asked: Callable[..., Asked]) -> None:
    stages, ledger, _ = asked("torch.compile", Task("gelu", "gelu-5x5", "fp32", "bwd", "cpu", 0))
    assert {"forward", "backward"} <= {s["part"] for s in stages if s["stage"] == "aten"}
    assert len([s for s in stages if s["stage"] == "sass"]) == 2  # one kernel per direction
    assert [(k.read, k.written) for k in ledger.kernels] == [(200, 100)]  # x and dy, dx: the forward is not timed


def test_a_lookup_a_slice_a_product_and_a_constant_are_shown_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(
        "from torch.nn.functional import embedding\n"
        "def look(i, w):\n    y = embedding(i, w)[:, 8:].clone()\n    y[:, 0] = 0\n    return y @ w[:8]\n"
    )
    target = targets.resolve(f"{tmp_path / 'look.py'}:look", ["i=i64[64] randint(0,100)", "w=fp32[100,16]"])[0]
    case = target.case()
    task = Task(target.name, case.name, "fp32", "bwd", "cpu", 0, target.detail(case))
    index = capture.stages([entry("torch.compile", target.name)], task, "sm_90", tmp_path / "out")
    (shown,) = index["providers"]
    assert shown["status"] == "ok", shown["reason"]
    assert [s["counts"]["REDG"] for s in shown["stages"] if s["stage"] == "sass" and "REDG" in s["counts"]] == [1]


def test_two_looks_at_the_same_code_differ_in_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the machine's load either; and a difference in the index is a line of it."""
    indices = []
    for load in (0.5, 3.0):
        monkeypatch.setattr(machine, "_load", lambda load=load: load)
        capture.stages(plugin.select(["lab_code_fakes:Shown"], "gelu", "cpu"), GELU, "sm_90", tmp_path / str(load))
        indices.append((tmp_path / str(load) / "index.json").read_text())
    assert indices[0] == indices[1]
    assert '    "stage": "text",\n' in indices[0]


def test_the_index_and_a_provider_that_dies(tmp_path: Path) -> None:
    names = [
        "lab_code_fakes:Segfault",
        "lab_code_fakes:Raising",
        "lab_code_fakes:Absent",
        "lab_code_fakes:Shown",
        "floor-copy",
    ]
    told: list[str] = []
    entries = plugin.select(names, "gelu", "cpu")
    index = capture.stages(entries, GELU, "sm_90", tmp_path, told.append, timeout=300)
    assert json.loads((tmp_path / "index.json").read_text()) == index
    assert told == ["segfault", "raising", "absent", "shown", "floor-copy"]
    dead, raising, absent, shown, floor = index["providers"]
    assert dead["status"] == "failed" and "SIGSEGV" in dead["reason"]
    assert raising["status"] == "failed" and raising["reason"] == "RuntimeError: no code <for> you"
    assert absent["status"] == "missing" and "pip install no-such-module" in absent["reason"]
    assert floor == {**floor, "status": "missing", "reason": "does not show its code", "stages": []}
    assert [s["file"] for s in shown["stages"]] == ["shown/00-text.py", "shown/01-text-a_b-_c_-9fe9fceb.cpp"]
    first, second = capture.for_record(index, tmp_path)
    assert first["text"] == "gelu-5x5 for sm_90\n" and first["lines"] == {"1": "a.py:1"}
    assert second["counts"] == {"n": 1}
    again = tmp_path / "again"
    capture.stages(entries[3:4], GELU, "sm_90", again, timeout=300)
    for stage in shown["stages"]:
        assert (again / stage["file"]).read_bytes() == (tmp_path / stage["file"]).read_bytes()


def test_a_used_folder_keeps_nothing_of_the_look_before(tmp_path: Path) -> None:
    out, entries = tmp_path / "out", plugin.select(["lab_code_fakes:Shown"], "gelu", "cpu")
    capture.stages(entries, GELU, "sm_90", out)
    index = json.loads((out / "index.json").read_text())
    stages = index["providers"][0]["stages"]
    # Files that an earlier run wrote and this one does not, and files that an index must not touch.
    others = ["gone/00-old.py", "gone/mine.py", "00-mine.py", "deep/er/00-mine.py", "../00-mine.py"]
    for name in others:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    (out / "link").symlink_to(tmp_path)
    named = [*others, "link/00-mine.py", str(tmp_path / "00-mine.py"), "gone/00-never-there.py"]
    stages += [{**stages[0], "file": name} for name in named]
    (out / "index.json").write_text(json.dumps(index))
    capture.stages(entries, GELU, "sm_90", out)
    assert [(out / name).exists() for name in others] == [False, True, True, True, True]
    assert all((out / stage["file"]).exists() for stage in stages[:2])


@pytest.mark.parametrize("content", ["[]", "{}", '{"kind": "mine"}', "{", '{"kind": "fusewise.code", "providers": 3}'])
def test_an_index_of_something_else_is_not_replaced(content: str, runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content)
    result = runner.invoke(cli, ["code", "gelu", "--device", "cpu", "--provider", "floor-copy", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "code: the folder must have no index.json but that of `fusewise code`" in " ".join(result.output.split())
    assert [file.name for file in tmp_path.iterdir()] == ["index.json"]
    assert (tmp_path / "index.json").read_text() == content


def test_ledgers_and_who_has_none(tmp_path: Path) -> None:
    entries = plugin.select(["lab_code_fakes:Shown", "floor-copy"], "gelu", "cpu")
    found, without = capture.ledgers(entries, [GELU], "sm_90", tmp_path, timeout=300)
    assert [(ledger.provider, ledger.bytes, ledger.excess) for ledger in found] == [("shown", 200, 1.0)]
    assert [(answer.provider, answer.status) for answer in without] == [("floor-copy", "missing")]


@pytest.fixture(scope="module")
def runner() -> CliRunner:
    return CliRunner()


def test_the_command_prints_one_stage(runner: CliRunner) -> None:
    arguments = ["code", "gelu", "--provider", "eager", "--stage", "bytecode", "--device", "cpu"]
    result = runner.invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("===== eager bytecode\n") and "LOAD_FAST" in result.stdout
    listed = runner.invoke(cli, ["code", "gelu", "--provider", "eager", "--device", "cpu", "--list"])
    assert "eager (ok)" in listed.stdout and "kernels 8" in listed.stdout and "LOAD_FAST" not in listed.stdout


def test_the_command_writes_a_folder(runner: CliRunner, tmp_path: Path) -> None:
    arguments = ["code", "gelu", "--provider", "lab_code_fakes:Shown", "--device", "cpu", "--out", str(tmp_path / "c")]
    result = runner.invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    index = json.loads(result.stdout)
    assert index["kind"] == "fusewise.code" and index["providers"][0]["stages"][0]["text"].startswith("gelu-5x5")
    assert (tmp_path / "c" / "index.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--target", "gfx942"], 2, "target must be a GPU like sm_90"),
        (["--target", "sm_999"], 2, "sm_90, sm_100, "),
        (["--case", "nothing"], 2, "Error: code: name must be that of a case in a preset, got 'nothing'; "),
        (
            ["--provider", "nobody"],
            2,
            "Error: code: providers must be among those of `fusewise providers`, got 'nobody'; ",
        ),
        (["--device", "tpu"], 2, "Error: code: device must be cpu or cuda[:index], got 'tpu'; "),
        (["--stage", "sass", "--out", "x"], 2, "--out writes every stage"),
        (["--provider", "floor-copy"], 1, "does not show its code"),
        (
            ["--provider", "eager", "--stage", "bytekode"],
            2,
            "code: stage must be one that there is, source, bytecode, aten (of eager), got 'bytekode'; try 'bytecode'",
        ),
        (["--provider", "floor-copy", "--stage", "sass"], 1, "does not show its code"),
    ],
)
def test_what_the_command_refuses(runner: CliRunner, arguments: list[str], code: int, message: str) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    result = runner.invoke(cli, ["code", "gelu", *device, *arguments])
    assert result.exit_code == code and message in " ".join(result.output.split())


def test_a_provider_without_the_stage_that_another_has_is_missing(runner: CliRunner) -> None:
    providers = ["--provider", "eager", "--provider", "lab_code_fakes:Shown"]
    result = runner.invoke(cli, ["code", "gelu", "--device", "cpu", *providers, "--stage", "bytecode", "--json"])
    assert result.exit_code == 0, result.output
    eager, other = json.loads(result.stdout)["providers"]
    assert (eager["status"], [s["stage"] for s in eager["stages"]]) == ("ok", ["bytecode"])
    assert (other["status"], other["stages"]) == ("missing", [])
    assert other["reason"].startswith("has no stage 'bytecode', but ")


@pytest.mark.gpu
def test_inductors_kernel_on_the_gpu_that_is_here(asked: Callable[..., Asked]) -> None:
    task = Task("gelu", "gelu-256", "fp32", "fwd", "cuda:0", 0)
    stages, ledger, _ = asked("torch.compile", task)
    names = [s["stage"] for s in stages]
    assert is_subsequence(["fx", "aten", "triton", "ttir", "ttgir", "llir", "ptx", "sass", "wrapper"], names)
    assert "cpp" not in names
    assert [(k.read, k.written) for k in ledger.kernels] == [(2**18, 2**18)]
    _, eager, _ = asked("eager", task)
    assert eager.bytes == 9 * 2**19


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case", "impl"),
    [
        *[("rope", "llama-3-8b-decode-b64", impl) for impl in ("triton", "cuda")],
        *[("geglu", "quick-square", impl) for impl in ("triton", "gluon", "cuda")],
    ],
)
def test_our_kernels_on_the_gpu_that_is_here(op: str, case: str, impl: str, asked: Callable[..., Asked]) -> None:
    stages, ledger, _ = asked(f"fusewise-{impl}", Task(op, case, "bf16", "fwd", "cuda:0", 0))
    assert "sass" in [s["stage"] for s in stages]
    assert (len(ledger.kernels), ledger.excess) == (1, 1.0)


@pytest.mark.gpu
def test_torchscripts_fuser_is_in_the_ledger(asked: Callable[..., Asked]) -> None:
    _, ledger, _ = asked("torchscript", Task("gelu", "gelu-256", "fp32", "fwd", "cuda:0", 0))
    assert ledger.bytes in (2**19, 9 * 2**19)  # one kernel, or eight if the fuser is off
