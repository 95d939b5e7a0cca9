"""Results of `fusewise tune`: which are loaded, which are rejected, and that calls use them."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewise
from fusewise._shared import cache as files
from fusewise.ops._tuned import Found, Key, Tuned, Watch

FOUND = Found(10.0, 12.5, 7, "2026-01-01T00:00:00+00:00")
KEY = Key("y", torch.bfloat16, "half, tma", 4096, 1024, 2048)


@dataclass(frozen=True)
class Tile:
    size: int
    split: bool = False


SPACE = [Tile(64), Tile(128), Tile(128, True)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSEWISE_TUNED", raising=False)
    return tmp_path / "cache" / "tuned"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text("a kernel")
    return path


def tuned(source: Path, space: list[Tile] = SPACE) -> Tuned[Tile]:
    """A new instance, as in another process."""
    return Tuned("op", "impl", [source], lambda key, device: space if key.kernel == "y" else [])


def test_what_is_kept_is_found_by_its_key_alone(source: Path, cache: Path) -> None:
    path = tuned(source).keep(-1, KEY, Tile(128), FOUND)
    assert path.parent == cache and path.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    later = tuned(source)
    assert later.find(-1, KEY) == Tile(128)
    for change in (
        {"rows": 4097}, {"hidden": 1}, {"inner": 2}, {"dtype": torch.float16}, {"kernel": "preact"}, {"way": "half, pointers"},
    ):  # fmt: skip
        assert later.find(-1, KEY._replace(**change)) is None


def test_a_later_result_replaces_an_earlier_one_and_no_other(source: Path) -> None:
    one = tuned(source)
    one.keep(-1, KEY, Tile(128), FOUND)
    one.keep(-1, KEY._replace(rows=8), Tile(64), FOUND)
    assert one.find(-1, KEY) == Tile(128)
    path = one.keep(-1, KEY, Tile(128, True), FOUND)
    assert one.find(-1, KEY) == Tile(128, True) and one.find(-1, KEY._replace(rows=8)) == Tile(64)
    assert len(json.loads(path.read_text())["entries"]) == 2


def test_one_read_a_process_and_none_before_a_call(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(source).keep(-1, KEY, Tile(128), FOUND)
    reads, read = [], files.read
    monkeypatch.setattr(files, "read", lambda path: reads.append(path) or read(path))
    later = tuned(source)
    assert not reads
    for rows in range(1, 50):
        later.find(-1, KEY._replace(rows=rows))
    assert len(reads) == 1


@pytest.mark.parametrize(
    "what", ["torch", "triton", "fusewise", "source", "device", "get_device_name", "get_device_capability"]
)
def test_results_of_another_version_or_device_are_stale(
    what: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = 0
    path = tuned(source).keep(device, KEY, Tile(128), FOUND)
    assert tuned(source).find(device, KEY) == Tile(128)
    if what == "source":
        source.write_text("another kernel")
    elif what == "device":
        device = -1
    elif what.startswith("get_"):
        monkeypatch.setattr(torch.cuda, what, lambda device: ("another", 0))
    else:
        monkeypatch.setattr(__import__(what), "__version__", "0.0.1")
    later = tuned(source)
    assert later.find(device, KEY) is None and not later.problems
    # Nor are they loaded from a file copied to the new name.
    later.path(device).write_bytes(path.read_bytes())
    later.path(device).chmod(0o600)
    assert tuned(source).find(device, KEY) is None


def test_each_implementation_has_a_file_of_its_own(source: Path) -> None:
    names = [("rope", "triton"), ("rope", "gluon"), ("gated_linear", "triton")]
    assert len({Tuned(op, impl, [source], lambda key, device: SPACE).path(-1) for op, impl in names}) == len(names)


def test_sources_that_cannot_be_read_are_told_of(source: Path) -> None:
    one = tuned(source)
    source.unlink()
    assert one.find(-1, KEY) is None and str(source) in one.explain(-1, [KEY])


def test_an_entry_outside_of_the_space_is_ignored(source: Path) -> None:
    first = tuned(source)
    first.keep(-1, KEY, Tile(128), FOUND)
    first.keep(-1, KEY._replace(rows=8), Tile(4096), FOUND)  # not in the search space
    first.keep(-1, KEY._replace(kernel="other"), Tile(128), FOUND)
    assert first.known(-1) == {KEY: Tile(128)}
    assert tuned(source, [Tile(64)]).known(-1) == {}


ENTRY = {
    "kernel": "y", "dtype": "bfloat16", "way": "half, tma", "rows": 4096, "inner": 1024, "hidden": 2048,
    "config": {"size": 128, "split": False}, "us": 10.0, "heuristic_us": 12.5, "rounds": 7, "created": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"rows": "4096"}, {"rows": True}, {"rows": -1}, {"rows": 0}, {"hidden": 0}, {"rows": 2**50}, {"kernel": None}, {"dtype": "int8"},
        {"us": "fast"}, {"us": -1.0}, {"heuristic_us": None}, {"config": None}, {"config": [128, False]}, {"config": {"size": 128}},
        {"config": {"size": 128.0, "split": False}}, {"config": {"size": 128, "split": 0}},
        {"config": {"size": 128, "split": False, "more": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_that_is_none_costs_itself_alone(change: dict[str, Any], source: Path) -> None:
    first = tuned(source)
    path = first.keep(-1, KEY._replace(rows=8), Tile(64), FOUND)
    data = json.loads(path.read_text())

    def with_entry(entry: Any) -> dict[Key, Tile]:
        path.write_text(json.dumps({**data, "entries": [entry, "nonsense", *data["entries"]]}))
        return tuned(source).known(-1)

    good = {KEY._replace(rows=8): Tile(64)}
    assert with_entry(ENTRY) == {KEY: Tile(128), **good}
    wrong = {**ENTRY, **change}
    assert with_entry(wrong) == good
    first.keep(-1, KEY._replace(rows=9), Tile(64), FOUND)
    assert tuned(source).known(-1) == {**good, KEY._replace(rows=9): Tile(64)}
    kept = json.loads(path.read_text())["entries"]
    assert "nonsense" not in kept and (wrong in kept) == ("config" in change)  # whose key is valid


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "null", "[]", "7", '{"version": 2}', '{"version": 1, "entries": {}}', "\xff\xfe"]
)
def test_a_damaged_file_is_ignored_told_of_and_replaced(text: str, source: Path) -> None:
    first = tuned(source)
    path = first.keep(-1, KEY, Tile(128), FOUND)
    path.write_bytes(text.encode("latin-1"))
    later = tuned(source)
    assert later.find(-1, KEY) is None
    if text != "null":
        assert str(path) in later.problems[-1] and "ignored" in later.explain(-1, [KEY])
    later.keep(-1, KEY, Tile(64), FOUND)
    assert tuned(source).find(-1, KEY) == later.find(-1, KEY) == Tile(64) and not later.problems


def test_a_file_of_another_format_is_not_read(source: Path) -> None:
    path = tuned(source).keep(-1, KEY, Tile(128), FOUND)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))
    later = tuned(source)
    assert later.find(-1, KEY) is None and later.problems


def test_a_file_that_is_too_large_is_named_with_the_one_fix(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned(source).keep(-1, KEY, Tile(128), FOUND)
    monkeypatch.setattr(files, "MAX_BYTES", path.stat().st_size)
    assert files.read(path)
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(files.Refused) as refused:
        files.read(path)
    assert str(refused.value) == f"{path} is larger than 10 bytes; remove it"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
@pytest.mark.parametrize("part", ["file", "folder"])
def test_what_others_could_have_written_is_refused(part: str, mode: int, source: Path, cache: Path) -> None:
    path = tuned(source).keep(-1, KEY, Tile(128), FOUND)
    (path if part == "file" else cache).chmod(mode | 0o100 * (part == "folder"))
    later = tuned(source)
    assert later.find(-1, KEY) is None and "writable by others" in later.problems[-1]
    if part == "folder":
        with pytest.raises(files.Refused, match="writable by others"):
            later.keep(-1, KEY, Tile(64), FOUND)
    cache.chmod(0o700)


@pytest.mark.parametrize(
    "part", ["all", pytest.param("file", marks=pytest.mark.skipif(os.getuid() != 0, reason="root gives files away"))]
)
def test_files_of_another_user_are_refused(part: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, user = tuned(source).keep(-1, KEY, Tile(128), FOUND), os.getuid()
    if part == "all":
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    else:
        os.chown(path, user := 12345, -1)
    later = tuned(source)
    assert later.find(-1, KEY) is None and f"belongs to user {user}" in later.problems[-1]
    with pytest.raises(files.Refused, match="belongs to user"):
        later.keep(-1, KEY, Tile(64), FOUND)


def test_a_symbolic_link_is_neither_read_nor_written_through(source: Path, tmp_path: Path) -> None:
    path = tuned(source).keep(-1, KEY, Tile(128), FOUND)
    target = tmp_path / "elsewhere.json"
    path.rename(target)
    path.symlink_to(target)
    before = target.read_bytes()
    later = tuned(source)
    assert later.find(-1, KEY) is None and later.problems
    with pytest.raises(files.Refused):
        later.keep(-1, KEY, Tile(64), FOUND)
    assert target.read_bytes() == before


def test_writers_at_once_lose_nothing(source: Path) -> None:
    def write(first: int) -> None:
        for rows in range(first, first + 5):
            tuned(source).keep(-1, KEY._replace(rows=rows), Tile(128), FOUND)

    writers = [threading.Thread(target=write, args=(1 + 5 * i,)) for i in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(key.rows for key in tuned(source).known(-1)) == list(range(1, 31))


def test_a_folder_that_cannot_be_made_is_one_clear_error(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(file / "below"))
    with pytest.raises(files.Refused, match="FUSEWISE_CACHE_DIR"):
        tuned(source).keep(-1, KEY, Tile(128), FOUND)
    assert tuned(source).find(-1, KEY) is None


def test_a_full_disk_costs_nothing_that_was_kept(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(source).keep(-1, KEY, Tile(128), FOUND)
    before = sorted(cache.iterdir())

    def full(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size, "what is written reaches the disk before the file has its name"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.Refused, match=r"No space left on device; set FUSEWISE_CACHE_DIR"):
        tuned(source).keep(-1, KEY, Tile(64), FOUND)
    assert tuned(source).find(-1, KEY) == Tile(128) and sorted(cache.iterdir()) == before


def test_the_environment_turns_it_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(source).keep(-1, KEY, Tile(128), FOUND)
    monkeypatch.setenv("FUSEWISE_TUNED", "0")
    assert tuned(source).find(-1, KEY) is None


def test_a_search_overrides_and_watches(source: Path) -> None:
    one = tuned(source)
    one.keep(-1, KEY, Tile(128), FOUND)
    assert one.find(-1, KEY) == Tile(128)
    with one.using(Tile(64)):
        assert one.find(-1, KEY) == Tile(64)
    watch = Watch()
    with one.using(watch):
        assert one.find(-1, KEY) is None
    assert watch.keys == [KEY] and one.find(-1, KEY) == Tile(128)


def test_its_state_changes_when_an_answer_may(source: Path) -> None:
    one = tuned(source)
    states = {one.state}
    with one.using(Tile(64)):
        states.add(one.state)
    assert one.state in states and len(states) == 2
    one.keep(-1, KEY, Tile(128), FOUND)
    assert one.state not in states


# The gated linear unit.

triton = pytest.importorskip("triton")

from fusewise.ops.gated_linear import _gluon, _triton  # noqa: E402
from fusewise.ops.gated_linear._gate_config import gate_key  # noqa: E402
from fusewise.ops.gated_linear._problem import Halves, Spec  # noqa: E402


@pytest.fixture
def fresh() -> Any:
    """No process-wide results before and after."""
    _triton.TUNED.forget()
    yield _triton.TUNED
    _triton.TUNED.forget()


SHAPES = [(1, 64), (64, 4096), (65, 40), (300, 136), (4096, 2048), (65536, 32768)]


@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
@pytest.mark.parametrize("tma", [True, False])
def test_the_space_of_triton_has_the_heuristic_first_and_can_run(rows: int, hidden: int, tma: bool) -> None:
    for epilogue in ("y", "preact", "gradient", "down"):
        key = Key(epilogue, torch.bfloat16, "tma" if tma else "pointers", rows, 64, hidden)
        assert _triton._space(key._replace(dtype=torch.float32), -1) == []  # the library's
        space = _triton.configurations(rows, hidden, 132, epilogue=epilogue, tma=tma)
        assert space[0] == _triton.choose(rows, hidden, 132, epilogue=epilogue, tma=tma)
        assert len(space) == len(set(space)) and 6 <= len(space) <= 40
        for config in space:
            assert config.block_d >= 16 and config.block_f >= 16 and config.block_m >= 16
            stage = (config.block_m + (1 if epilogue == "down" else 2) * config.block_f) * config.block_d * 2
            assert config.num_stages * stage <= 227 * 1024
            assert not config.split or (tma and config.block_f >= 32)
        assert _triton._space(key, -1) == space


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_the_space_of_the_elementwise_kernel(rows: int, hidden: int, sums: bool) -> None:
    space = _triton.gate_configurations(rows, hidden, 132, sums=sums)
    assert space[0] == _triton.choose_gate(rows, hidden, 132, sums=sums) and len(space) == len(set(space)) > 1
    assert all(config.rows % config.block_m == 0 for config in space)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_the_space_of_the_elementwise_kernel_in_gluon(rows: int, hidden: int, sums: bool) -> None:
    space = _gluon.gate_configurations(rows, hidden, 132, sums=sums)
    assert space[0] == _gluon.choose_gate(rows, hidden, 132, sums=sums) and len(space) == len(set(space)) > 1
    # Eight columns per thread, and no idle threads.
    assert all(config.block_m * config.block_f >= 8 * 32 * config.num_warps for config in space)


def test_the_space_of_gluon_has_the_heuristic_first() -> None:
    for epilogue in ("y", "preact", "gradient", "down"):
        space = _gluon._space(Key(epilogue, torch.bfloat16, "", 4096, 64, 64), -1)
        assert space[0] == _gluon.choose(epilogue) and set(space) == set(_gluon.configurations(epilogue))


@pytest.mark.parametrize("module", [_triton, _gluon], ids=["triton", "gluon"])
@pytest.mark.parametrize(("kernel", "way"), [("sideways", "tma"), ("sideways", ""), ("y", "tma, more")])
def test_no_space_for_what_is_no_kernel(module: Any, kernel: str, way: str) -> None:
    if (module, kernel) != (_gluon, "y"):  # whose kernels have no ways
        assert module._space(Key(kernel, torch.bfloat16, way, 64, 64, 64), -1) == []


def test_a_call_takes_what_was_tuned_for_its_shape_alone(fresh: Any) -> None:
    x, other = torch.randn(128, 64, dtype=torch.bfloat16), torch.randn(129, 64, dtype=torch.bfloat16)
    before = _triton._configure("y", x, 96, True)
    config = _triton.configurations(128, 96, 132, epilogue="y", tma=True)[-1]
    assert config != before == _triton.choose(128, 96, 132, epilogue="y", tma=True)
    fresh.keep(-1, _triton.product_key("y", x, 96, True), config, FOUND)
    assert _triton._configure("y", x, 96, True) == config
    for epilogue, tensor, hidden, tma in (
        ("preact", x, 96, True), ("y", other, 96, True), ("y", x, 104, True), ("y", x, 96, False), ("y", x.half(), 96, True),
    ):  # fmt: skip
        chosen = _triton.choose(tensor.shape[0], hidden, 132, epilogue=epilogue, tma=tma)
        assert _triton._configure(epilogue, tensor, hidden, tma) == chosen


@pytest.mark.parametrize("sums", [True, False])
def test_a_gradient_takes_what_was_tuned_with_or_without_sums(
    sums: bool, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(_triton, "start_gradient", lambda *arguments: started.append(arguments[3]))
    dy, preact = torch.empty(65536, 64), torch.empty(65536, 128)

    def run() -> Any:
        _triton.gradient(dy, preact, preact, Spec("silu", "stacked"), torch.empty(2, 64) if sums else None)
        return started.pop()

    chosen, opposite = (_triton.choose_gate(65536, 64, 132, sums=way) for way in (sums, not sums))
    key, other = (gate_key(torch.float32, 65536, 64, way) for way in (sums, not sums))
    assert run() == chosen == _triton._space(key, -1)[0] != opposite
    fresh.keep(-1, other, _triton._space(other, -1)[-1], FOUND)
    assert run() == chosen
    fresh.keep(-1, key, _triton._space(key, -1)[-1], FOUND)
    assert run() == _triton._space(key, -1)[-1] != chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_way_through_triton_says_that_its_gradient_is_tuned(dtype: torch.dtype, bias: bool, fresh: Any) -> None:
    x, weight = torch.empty(40, 32, dtype=dtype), torch.empty(128, 32, dtype=dtype)
    halves = Halves.of(Spec("silu", "stacked"), weight, None, torch.empty(128, dtype=dtype) if bias else None)
    key, other = (gate_key(dtype, 40, 64, sums) for sums in (bias, not bias))
    fresh.keep(-1, other, _triton._space(other, -1)[-1], FOUND)
    assert "tuned" not in _triton.path(x, halves)
    fresh.keep(-1, key, _triton._space(key, -1)[-1], FOUND)
    assert "tuned" in _triton.path(x, halves)


@pytest.mark.interpreter
def test_explain_dispatch_says_tuned_and_the_kernel_is_launched_so(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 32).bfloat16(), (torch.randn(64, 32) / 6).bfloat16()
    call = {"impl": "triton"}
    assert "tuned" not in fusewise.explain_dispatch(fusewise.geglu_linear, x, weight, **call).path
    space = _triton.configurations(40, 32, 132, epilogue="y", tma=True)
    config = next(c for c in space if c.block_f != space[0].block_f)
    fresh.keep(-1, _triton.product_key("y", x, 32, True), config, FOUND)
    told = fusewise.explain_dispatch(fusewise.geglu_linear, x, weight, **call)
    assert told.path.endswith("configuration tuned on this machine for y")
    launched, launch = [], _triton._start
    monkeypatch.setattr(_triton, "_start", lambda *a: launched.append(a[2]) or launch(*a))
    y = fusewise.geglu_linear(x, weight, **call)
    assert launched == [config]
    torch.testing.assert_close(y, fusewise.geglu_linear(x, weight, impl="reference"))
