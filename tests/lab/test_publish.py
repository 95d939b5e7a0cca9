"""benchmarks/publish.py: a comparison is published completely or not at all."""

import importlib.util
from pathlib import Path

import pytest
from builders import row

from fusewise.lab import record


@pytest.fixture(scope="module")
def publish():
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "publish.py"
    spec = importlib.util.spec_from_file_location("publish", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.publish


def written(path, *rows):
    path.unlink(missing_ok=True)
    record.append_rows(path, rows)
    return path


def measured(provider, run, us=1.0, **fields):
    return row(provider, run=run, device_us=us, **fields)


@pytest.fixture
def to(tmp_path):
    return written(
        tmp_path / "published.jsonl",
        measured("eager", "r1"), measured("fusewise-cpu", "r1"), measured("fusewise-cpu", "r1", case="other"),
    )  # fmt: skip


def test_a_comparison_takes_the_place_of_the_published_one(publish, tmp_path, to):
    new = [measured("eager", "r2"), measured("liger", "r2"), measured("fusewise-cpu", "r2", 0.5)]
    assert publish([written(tmp_path / "new.jsonl", *new)], to) == []
    assert [(r.case, r.run, r.provider) for r in record.read_rows(to)] == [
        *((r.case, "r2", r.provider) for r in new),
        ("other", "r1", "fusewise-cpu"),
    ]


def test_the_latest_of_several_runs_counts(publish, tmp_path, to):
    files = [
        written(tmp_path / f"{run}.jsonl", measured("eager", run), measured("fusewise-cpu", run))
        for run in ("r3", "r2")
    ]
    assert publish(files, to) == []
    assert {r.run for r in record.read_rows(to)} == {"r1", "r3"}
    assert len(record.read_rows(to)) == 3


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("no: /home/me/a b.so", "no: a b.so"),
        ("OSError: /opt/x/site-packages/vllm/_C.so: undefined symbol", "OSError: _C.so: undefined symbol"),
        ('File "/usr/lib/python3/y.py", line 3', 'File "y.py", line 3'),
        ("see https://example.org/a/b/c", "see https://example.org/a/b/c"),
        ("takes bf16/fp16, 3 / 4 of fusewise/lab/x.py", "takes bf16/fp16, 3 / 4 of fusewise/lab/x.py"),
    ],
)
def test_where_files_lie_on_a_machine_is_not_published(publish, tmp_path, to, reason, kept):
    missing = row("liger", "missing", run="r2", reason=reason)
    rows = [measured("eager", "r2"), measured("fusewise-cpu", "r2"), missing]
    assert publish([written(tmp_path / "new.jsonl", *rows)], to) == []
    assert [r.reason for r in record.read_rows(to) if r.provider == "liger"] == [kept]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([("eager", {}), ("fusewise-cpu", {"status": "wrong", "device_us": None})], "nothing of fusewise's is right"),
        (
            [("eager", {}), ("fusewise-cpu", {}), ("liger", {"status": "failed", "reason": "out of memory", "device_us": None})],
            "memory did not suffice for liger",
        ),
        (
            [("eager", {}), ("fusewise-cpu", {}), ("vllm", {"status": "failed", "reason": "not started again", "device_us": None})],
            "vllm had been given up by then",
        ),
        ([("fusewise-cpu", {})], "eager would be lost"),
    ],
)  # fmt: skip
def test_what_is_no_whole_comparison_stays_out(publish, tmp_path, to, rows, why):
    before = to.read_text()
    new = written(
        tmp_path / "new.jsonl", *(row(name, run="r2", **{"device_us": 1.0, **fields}) for name, fields in rows)
    )
    (line,) = publish([new], to)
    assert line.endswith(": " + why)
    assert to.read_text() == before
    if "lost" in why:
        assert publish([new], to, fewer=True) == []
        assert [r.provider for r in record.read_rows(to)] == ["fusewise-cpu", "fusewise-cpu"]


def test_an_operation_that_we_have_no_kernel_for_is_published(publish, tmp_path, to):
    new = written(tmp_path / "new.jsonl", measured("eager", "r2", op="gelu", case="gelu-16"))
    assert publish([new], to) == []
    assert "gelu-16" in {r.case for r in record.read_rows(to)}


def test_the_published_files_hold_one_run_of_each_comparison():
    for path in (Path(__file__).resolve().parents[2] / "benchmarks" / "baselines").glob("*.jsonl"):
        runs = {}
        for found in record.read_rows(path):
            runs.setdefault(found.key, set()).add(found.run)
        assert all(len(of) == 1 for of in runs.values())
