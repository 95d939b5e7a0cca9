"""Ledgers against GPU performance counters: ncu's output becomes a table. The counters themselves need a GPU."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from builders import row, study_record

from fusewise.lab import plugin, record, targets
from fusewise.lab.ledger import Kernel, Ledger, Product
from fusewise.lab.problem import Task

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "counters.py"
HEAD = """==PROF== Connected to process 12
a line of the program, "ID" in it
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","Mbyte","byte","us"
"""
LINES = """"0","12","void add<float, 4>(int)","100.5","1,000","6.25"
"1","12","mul","0","99,499,000","3.75"
"""
PRINTED = HEAD + LINES
AFTER = """"2","12","reduce","105.0","9,000,000","50.0"
"""


@pytest.fixture(scope="module")
def counters():
    spec = importlib.util.spec_from_file_location("counters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["counters"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_units_and_thousands(counters):
    found = counters.parsed(PRINTED)
    assert found == [("void add<float, 4>(int)", 6.25, 100.5e6, 1000.0), ("mul", 3.75, 0.0, 99_499_000.0)]


def test_of_several_calls_the_medians_count(counters):
    kernels = [
        counters.Counted(name, us, 10.0 * i, 5.0)
        for i in range(counters.CALLS)
        for name, us in (("a", 1.0 + i), ("b", 2.0))
    ]
    assert counters.typical(kernels) == [("a", 5.0, 40.0, 5.0), ("b", 2.0, 40.0, 5.0)]
    for odd in (kernels[1:], [*kernels[:-1], kernels[0]]):
        with pytest.raises(ValueError, match="calls must start the same kernels"):
            counters.typical(odd)


def test_what_is_no_table_is_an_error_with_the_reason(counters):
    with pytest.raises(ValueError, match=r"counters: ncu must print a table, got '==ERROR== ERR_NVGPUCTRPERM"):
        counters.parsed("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_a_run_beside_what_was_counted(counters, tmp_path, monkeypatch, capsys):
    made = study_record(
        [
            row("eager", device_us=12.5, kernel_us=10.5),
            row("floor-copy", device_us=9.0, kernel_us=8.0),
            row("liger", status="missing", device_us=None),
            row("jax", device_us=12.0, kernel_us=10.0),
        ]
    )
    op, case, dtype, pass_ = made.rows[0].key
    product = Product(x=0, weights=2**20, passes=29, waves=1)
    kernels = (
        Kernel(name="mm", read=2**20, written=50 * 2**20, product=product),
        Kernel(name="mul", read=0, written=49 * 2**20),
    )
    ledger = Ledger(op=op, case=case, dtype=dtype, pass_=pass_, provider="eager", kernels=kernels)
    made.ledgers.append(ledger.to_json())
    record.save(made, tmp_path)
    program = tmp_path / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'a').write(sys.argv[-1] + ' ')\n"
        f"print({HEAD + (LINES + AFTER) * counters.CALLS!r})\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(counters, "NCU", str(program))
    counters.main([str(tmp_path)], tmp_path / "counted.jsonl")
    assert (tmp_path / "asked").read_text().split() == ["eager"]  # skipped: those without a ledger
    printed = capsys.readouterr()
    assert printed.err == f"jax of {case} is not counted: the run has no ledger of it\n"
    lines = printed.out.splitlines()
    # ledger 100 MiB, 28 read again, counted 200 MB and 9 written afterwards; profiler 10.5 µs, counters 10, timer 12.5
    assert [cell.strip() for cell in lines[2].split("|")[2:-1]] == [
        "eager",
        "2",
        "100",
        "128",
        "199",
        "0.642",
        "10.5",
        "10.0",
        "1.05",
        "12.5",
    ]
    assert len(lines) == 3
    (line,) = (tmp_path / "counted.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["provider"], found["run"]) == ("eager", made.rows[0].run)
    assert (found["ledger_bytes"], found["again_bytes"] >> 20, found["counted_bytes"], found["counted_us"]) == (
        100 * 2**20,
        28,
        209_000_000,
        10.0,
    )


def test_a_program_that_ends_badly_is_an_error(counters, tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "NCU", "false")
    with pytest.raises(RuntimeError, match=r"counters: false .* ended with 1"):
        counters.count(row("eager"), "cuda")


COUNTED = Path(__file__).resolve().parents[2] / "benchmarks" / "counted.jsonl"
ENTRIES = [json.loads(line) for line in COUNTED.read_text(encoding="utf-8").splitlines()]


# Without torch.compile's, whose product is that of eager code, and eager code's larger products, which take 20 s here.
@pytest.mark.parametrize(
    "entry",
    [
        e
        for e in ENTRIES
        if "fusewise" in e["provider"] or (e["provider"], e["case"]) == ("eager", "memory-n16384-d1024")
    ],
    ids=lambda e: f"{e['case']}-{e['provider']}",
)
def test_the_ledgers_that_are_published_are_those_of_today(entry) -> None:
    """Through 60 MiB, an H200's L2."""
    task = Task(entry["op"], entry["case"], entry["dtype"], entry["pass"], "cpu", 0)
    provider = plugin.select([entry["provider"]], task.op, task.device)[0].provider
    kernels = provider.traffic(targets.problem_for(task).compact(), "sm_90")
    assert sum(kernel.bytes for kernel in kernels) == entry["ledger_bytes"]
    assert sum(kernel.again(60 * 2**20) for kernel in kernels) == entry["again_bytes"]


def test_the_page_shows_what_was_counted() -> None:
    page = (COUNTED.parents[1] / "docs" / "measuring.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\| ([\w.-]+ \| \d \| [\d,]+ \+ [\d,]+ \| [\d,]+ \| [\d.]+ \|)", page))
    mib = [[e[key] / 2**20 for key in ("ledger_bytes", "again_bytes", "counted_bytes")] for e in ENTRIES]
    assert shown >= {
        f"{e['provider']} | {e['kernels']} | {own:,.0f} + {again:,.0f} | {counted:,.0f} | {(own + again) / counted:.2f} |"
        for e, (own, again, counted) in zip(ENTRIES, mib, strict=True)
    }
    assert all(0.9 < (own + again) / counted < 1.1 for own, again, counted in mib)
