"""Generate docs/questions.md from the published rows and from computed ledgers: `python benchmarks/questions.py [FILE]`.

Every number on the page is a function of `benchmarks/baselines/*.jsonl` or of the operators' byte counts, which do not depend
on the machine; a test checks the page against both. If a comparison was measured several times, the latest run is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from fusewise.lab import record, targets
from fusewise.lab.code import inductor, passes
from fusewise.lab.code.worker import Server
from fusewise.lab.problem import Task
from fusewise.lab.providers import pytorch
from fusewise.lab.record import Row
from fusewise.lab.render import host, markdown, number, percent, size

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "benchmarks" / "baselines"
PAGE = ROOT / "docs" / "questions.md"
COMPILED = "torch.compile"
#: fusewise implementations that work out of place, like those they are compared with.
OURS = ("fusewise-cuda", "fusewise-triton", "fusewise-cpu")
Groups = dict[tuple[str, str, str, str], dict[str, Row]]


def latest(rows: Iterable[Row], needed: Sequence[str] = (COMPILED,)) -> Groups:
    """Correct, timed rows by group, then by provider, from the latest run that has all `needed` providers."""
    runs: dict[tuple[str, str, str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row.status == "ok" and row.device_us is not None:
            runs.setdefault(row.key, {}).setdefault(row.run, {})[row.provider] = row
    found: Groups = {}
    for key, of_runs in runs.items():
        fitting = [run for run, group in of_runs.items() if set(needed) <= set(group)]
        if fitting:  # run ids start with a timestamp
            found[key] = of_runs[max(fitting)]
    return found


def time(group: Mapping[str, Row], provider: str) -> float:
    value = group[provider].device_us
    assert value is not None
    return value


def best(group: Mapping[str, Row], of: Sequence[str] = OURS) -> Row:
    """The fastest of the given providers in the group."""
    return group[min((name for name in of if name in group), key=lambda name: time(group, name))]


def spread(values: Sequence[float]) -> str:
    """Format as `1.05 to 1.40, median 1.20`."""
    return f"{number(min(values))} to {number(max(values))}, median {number(median(values))}"


def lacking(what: str, command: str) -> str:
    return f"**Not measured yet:** {what}. The command that answers it there:\n\n```\n{command}\n```"


def where(rows: Sequence[Row]) -> str:
    days = sorted({row.run[:8] for row in rows})
    versions = sorted({row.versions["torch"].partition("+")[0] for row in rows})
    dates = [f"{day[:4]}-{day[4:6]}-{day[6:]}" for day in days]
    return f"{rows[0].device}, torch {', '.join(versions)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def kernels(h200: Sequence[Row], cpu: Sequence[Row]) -> list[str]:
    """Kernel against kernel: the device-time gain of fusing RoPE."""
    parts = [
        "## How much faster is a fused RoPE, kernel against kernel?",
        "Device time only, without launch or Python overhead; cold cache, same tensors, every result within the error bound "
        "derived from eager code's own error against float64.",
    ]
    found = latest(h200, (COMPILED, "eager"))
    lines = []
    for pass_ in ("fwd", "bwd"):
        groups = {k: g for k, g in found.items() if k[1].endswith("-train") and k[3] == pass_ and set(OURS) & set(g)}
        if not groups:
            continue
        for key, group in groups.items():
            copy, eager, compiled = (time(group, name) for name in ("floor-copy", "eager", COMPILED))
            mine = time(group, best(group).provider)
            ratios = (number(eager / mine), number(compiled / mine))
            lines.append([f"{key[1]} {pass_}", *map(number, (copy, eager, compiled, mine)), *ratios])
        eagers = [time(g, "eager") / time(g, best(g).provider) for g in groups.values()]
        compilers = [time(g, COMPILED) / time(g, best(g).provider) for g in groups.values()]
        name, which = {
            "fwd": ("Forward", "out of place"),
            "bwd": ("Backward", "CUDA overwrites an incoming gradient that nothing else references"),
        }[pass_]
        parts.append(
            f"{name}, {len(groups)} models' training shapes on an H200: eager code takes {spread(eagers)} times as long as the "
            f"faster fusewise kernel ({which}), {COMPILED} {spread(compilers)}."
        )
    columns = ["case", "copy µs", "eager µs", f"{COMPILED} µs", "fusewise µs", "eager ×", f"{COMPILED} ×"]
    parts.append(markdown.table(columns, lines))
    parts.append(
        "Against eager code the speedup is large, but most of it comes from fusion, by any means. The fair baseline is the "
        "compiler; where it differs is in its graphs and generated code, which `fusewise code rope` prints stage by stage "
        "([code.md](code.md))."
    )
    small = {k: g for k, g in latest(cpu, (COMPILED, "eager")).items() if k[1] == "seqlen-128"}
    for key, group in small.items():
        ours = best(group)
        parts.append(
            f"On two CPU cores, batch 32, 128 tokens, 8 heads of 256, {key[2]} {key[3]}: eager {number(time(group, 'eager'))} µs, "
            f"{COMPILED} {number(time(group, COMPILED))}, {ours.provider} {number(time(group, ours.provider))}, a copy "
            f"{number(time(group, 'floor-copy'))}."
        )
    sweep = {k: g for k, g in found.items() if k[1].startswith("seqlen-")}
    if sweep:
        swept = [time(g, "eager") / time(g, best(g).provider) for g in sweep.values()]
        parts.append(
            f"Over the sweep of {len(sweep)} sequence lengths and passes on an H200, eager code takes {spread(swept)} times as long."
        )
    else:
        parts.append(
            lacking(
                "the sweep over sequence lengths 32 to 2048 (batch 32, 8 heads of 256, fp32) on an H200, forward and backward",
                "fusewise study rope-seqlen --append-rows benchmarks/baselines/h200.jsonl",
            )
        )
    return parts


def launches(h200: Sequence[Row]) -> list[str]:
    """PyTorch and CUDA have similar device times: why write a kernel?"""
    served = [row for row in h200 if "-serve-" in row.case]
    rows = [row for group in latest(served or h200).values() for row in group.values() if row.pass_ == "fwd"]
    found = [g for g in host.groups(rows) if served or "width" not in g.key[1]]
    parts = [
        "## PyTorch and CUDA have similar performance. Why write a CUDA kernel then?",
        "Because of host overhead. Back-to-back calls take the longer of device time and host time.",
        *host.answer(found),
    ]
    shown = ("eager", COMPILED, "vllm", "flashinfer", "liger", *OURS[:2])
    sizes = [g for g in found if g.key[1].startswith("llama-3-8b")]
    lines = []
    for group in sorted(sizes, key=lambda g: min(line.device_us for line in g.lines)):
        by_name = {line.provider: line for line in group.lines}
        cells = [by_name.get(name) for name in shown]
        text = ["–" if c is None else f"{number(c.device_us)} / {number(c.host_us)} {c.decided_by}" for c in cells]
        lines.append([group.key[1], *text])
    if lines:
        parts.append(
            "Device / host time in µs and which of them decides; 32 q heads and 8 k heads, head_dim 128, bf16:"
        )
        parts.append(markdown.table(["case", *shown], lines))
    if not served:
        parts.append(
            lacking(
                "the same in the form of serving engines (in place, flat tokens, positions and one cache), with the CUDA kernel "
                "of fusewise",
                "fusewise study rope-serving --append-rows benchmarks/baselines/h200.jsonl",
            )
        )
    return parts


def moving(h200: Sequence[Row], excess: Callable[[str, str, str], tuple[float, int, float]]) -> list[str]:
    """Compute-bound or memory-bound? `excess(op, case, dtype)` is the function `excess` below."""
    gelu, count, fused = excess("gelu", "gelu-256", "fp32")
    rope, rope_count, rope_fused = excess("rope", "llama-3-8b-step-4k", "bf16")
    parts = [
        "## Are we computing, or moving memory?",
        f"GELU written out in its tanh form runs {count} kernels, which move {number(gelu)} times the bytes of "
        f"one read and one write of its tensor; compiled for a GPU, {number(fused)} times. transformers' RoPE, for q and k of a Llama-3-8B "
        f"training step, moves {number(rope)} times the minimum in {rope_count} kernels; compiled for a GPU, {number(rope_fused)} times. "
        "These are byte counts ([profile.md](profile.md)), valid on every machine that runs the same operators.",
    ]
    found = {
        k: g
        for k, g in latest(h200, (COMPILED, "eager")).items()
        if k[:2] == ("rope", "llama-3-8b-train") and k[3] == "fwd"
    }
    for group in found.values():
        copy, eager, compiled = (time(group, name) for name in ("floor-copy", "eager", COMPILED))
        row = group["eager"]
        assert row.bytes_min is not None and row.flops_min is not None
        parts.append(
            f"Rotating {size(row.bytes_min)} needs {number(row.flops_min / row.bytes_min)} operations per byte. On an H200, "
            f"{COMPILED} takes {number(compiled / copy)} times as long as a copy of those bytes ({number(copy)} µs), which computes "
            f"nothing, so this kernel is memory-bound. Eager code takes {number(eager / copy)} times the copy. Its bytes explain a factor of "
            f"{number(rope)}; the rest is that its kernels run at {percent(rope * copy / eager)} of the copy's bandwidth."
        )
    decode = {
        k: g
        for k, g in latest(h200, (COMPILED, "eager")).items()
        if k[:2] == ("rope", "llama-3-8b-decode-b1") and k[3] == "fwd"
    }
    for group in decode.values():
        eager_row, launch = group["eager"], group["floor-launch"]
        parts.append(
            f"With one token, neither is the limit. Copying the bytes takes {number(time(group, 'floor-copy'))} µs and launching an "
            f"empty kernel {number(launch.device_us)} µs of device time, while eager code occupies the host for {number(eager_row.host_us)} "
            f"µs to produce {number(eager_row.device_us)} µs of device work: the CPU cannot feed the GPU fast enough."
        )
    sizes = [
        g for k, g in latest(h200, (COMPILED, "eager", "floor-launch")).items() if k[0] == "gelu" and k[3] == "fwd"
    ]
    if sizes:
        parts += by_size(sorted(sizes, key=lambda group: group["eager"].bytes_min or 0))
    else:
        parts.append(
            lacking(
                "GELU from 5 × 5 elements to 4 GiB on an H200, where the share of a copy would show at which size moving memory "
                "takes over from launch latency",
                "fusewise study gelu-sizes --append-rows benchmarks/baselines/h200.jsonl",
            )
        )
    return parts


def by_size(groups: Sequence[Mapping[str, Row]]) -> list[str]:
    """GELU by size, smallest first: where memory traffic outweighs kernel launches."""
    shown = ("floor-launch", "floor-copy", "eager", COMPILED, "aten-gelu")
    lines = [
        [g["eager"].case, size(g["eager"].bytes_min), *(number(time(g, n)) if n in g else "–" for n in shown)]
        for g in groups
    ]
    bound = next((g for g in groups if time(g, "floor-copy") > 2 * time(g, "floor-launch")), None)
    said = (
        f"From {bound['eager'].case} on ({size(bound['eager'].bytes_min)}) a copy takes more than twice as long as launching a kernel: "
        "from there on memory traffic dominates. "
        if bound
        else "A copy takes less than twice as long as launching a kernel at every size. "
    )
    last = groups[-1]
    copy, eager, compiled = (time(last, name) for name in ("floor-copy", "eager", COMPILED))
    said += f"At the largest size, eager code takes {number(eager / copy)} times the copy, {COMPILED} {number(compiled / copy)} times."
    columns = ["GELU forward, device µs", "bytes", *shown]
    return [said, markdown.table(columns, lines)]


def excess(op: str, case: str, dtype: str) -> tuple[float, int, float]:
    """Return (eager bytes / minimum bytes, number of eager kernels, bytes of Inductor's Hopper kernels / minimum bytes).

    Needs no GPU: torch is patched to report one, so call this in a separate process.
    """
    problem = targets.problem_for(Task(op, case, dtype, "fwd", "cpu", 0))
    eager = Server(pytorch.Eager()).ledger(problem, "sm_90")
    assert eager.excess is not None
    program = problem.program()
    graphs = inductor.lowered(passes.runner(problem, pytorch.TorchCompile().build(problem)), program.function)
    compiled = [kernel for graph in inductor.cross_compiled(graphs, "sm_90") for kernel in graph.kernels]
    return eager.excess, len(eager.kernels), sum(kernel.bytes for kernel in compiled) / problem.bytes_min()


def page(
    h200: Sequence[Row], cpu: Sequence[Row], excess: Callable[[str, str, str], tuple[float, int, float]] = excess
) -> str:
    rope = [row for row in h200 if row.op == "rope"]
    parts = [
        "# Three questions, answered by measured rows",
        "Generated by `python benchmarks/questions.py` from [h200.jsonl](../benchmarks/baselines/h200.jsonl) "
        f"({where(h200)}) and [cpu.jsonl](../benchmarks/baselines/cpu.jsonl) ({where(cpu)}). A test checks every figure against the rows.",
        *kernels(rope, [row for row in cpu if row.op == "rope"]),
        *launches(rope),
        *moving(h200, excess),
    ]
    return "\n\n".join(parts) + "\n"


def main(out: Path = PAGE) -> None:
    h200, cpu = (record.read_rows(BASELINES / f"{name}.jsonl") for name in ("h200", "cpu"))
    record.write_atomically(out, page(h200, cpu))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", default=PAGE, help="default: %(default)s")
    main(parser.parse_args().file)
