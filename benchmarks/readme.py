"""Generate the numbers in README.md and docs/results.md from the published rows: `python benchmarks/readme.py` writes them
between their marker comments and draws docs/rope-h200.png. A test compares both pages with the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "benchmarks" / "baselines"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")

#: Names marked * work in place.
GPU = {
    "fusewise-triton": "Triton",
    "fusewise-cuda": "CUDA",
    "fusewise-triton-inplace": "Triton*",
    "fusewise-cuda-inplace": "CUDA*",
    "torch.compile": "torch.compile",
    "liger": "Liger*",
    "flash_attn": "flash-attn",
    "quack": "QuACK",
    "flashinfer": "FlashInfer*",
    "vllm": "vLLM*",
    "transformer_engine-fused": "TE",
}
# fusewise in shades of one color that no other provider has.
COLOURS = dict(
    zip(GPU, ["#08306b", "#2171b5", "#6baed6", "#c6dbef", *(f"C{i}" for i in (1, 2, 3, 4, 5, 6, 7))], strict=True)
)
CPU = {
    "fusewise-cpu": "fusewise",
    "torch.compile": "torch.compile",
    "eager": "eager",
    "torchscript": "TorchScript",
    "jax": "JAX",
}
COMPILERS = {**CPU, "tvm": "TVM", "thunder": "Thunder"}
SHOWN = {
    "llama-3-8b-train": "Llama-3-8B training",
    "gemma-7b-train": "Gemma-7B training",
    "phi-2-train": "Phi-2 training (32 of 80 features rotate)",
    "gpt-neox-20b-train": "GPT-NeoX-20B training (24 of 96)",
    "glm-4-9b-train": "GLM-4-9B training (64 of 128, interleaved)",
    "deepseek-v3-train": "DeepSeek-V3 training (64 of 192, interleaved to half)",
    "llama-3-8b-prefill-8k": "Llama-3-8B prefill, 8192 tokens",
    "llama-3-8b-decode-b64": "Llama-3-8B decode, 64 tokens",
    "gemma-7b-decode-b64": "Gemma-7B decode, 64 tokens",
}
GATED = {
    "fusewise-cuda": "fusewise",
    "fusewise-cuda-recompute": "recomputing",
    "fusewise-gluon": "in Gluon",
    "fusewise-triton": "in Triton",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "quack-interleaved": "QuACK",
    "eager": "eager",
}
MLP = {
    "fusewise-cuda": "fusewise",
    "fusewise-cuda-recompute": "fusewise, recomputing",
    "fusewise-gluon": "in Gluon",
    "fusewise-gluon-recompute": "in Gluon, recomputing",
    "quack": "QuACK",
    "quack-recompute": "QuACK, recomputing",
    "torch.compile": "torch.compile",
    "liger": "Liger",
}
# For the table with both passes; the other providers are measured for few rows only.
TRAINED = {name: word for name, word in GATED.items() if name not in ("fusewise-triton", "eager")}
FLOAT32 = {
    "fusewise-cuda": "in CUDA",
    "fusewise-cuda-recompute": "recomputing",
    "fusewise-triton": "cuBLAS and Triton",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "unsloth": "unsloth",
    "transformer_engine": "TransformerEngine",
    "eager": "eager",
}
KEPT = {
    "fusewise-cuda": "fusewise, y alone",
    "fusewise-cuda-training": "fusewise, y and pre-activations",
    "torch.compile": "torch.compile",
    "eager": "eager",
}
EVERY = {
    "fusewise-cuda": "fusewise",
    "fusewise-cuda-recompute": "recomputing",
    "fusewise-gluon": "in Gluon",
    "fusewise-triton": "in Triton",
    "torch.compile": "torch.compile",
    "torch.compile-max-autotune": "max-autotune",
    "jax": "JAX",
    "liger": "Liger",
    "unsloth": "unsloth",
    "torchscript": "TorchScript",
    "eager": "eager",
}
MLP_SHOWN = ("mlp-n16384-d1024", "mlp-n16384-d2048")
GATED_SHOWN = (
    "memory-n16384-d1024", "memory-n16384-d2048", "memory-n16384-d4096", "memory-n16384-d8192", "memory-n32768-d8192",
    "gemma-2b-train", "gemma-7b-train", "gemma-2-9b-train", "llama-3-8b-train", "llama-3-70b-train", "phi-3-mini-train",
    "flux2-klein-4b-train", "sdxl-640-train", "sdxl-1280-train",
)  # fmt: skip
SHAPES = ("shapes-aligned", "shapes-hidden-8191")
DECODED = [
    f"{model}-decode-b{rows}"
    for model in ("llama-3-70b", "gemma-7b", "llama-3-8b", "phi-3-mini")
    for rows in (1, 16, 64, 128)
]
BATCHED = [
    f"{model}-batch-{rows}"
    for model in ("llama-3-70b", "llama-3-8b", "gemma-2b", "phi-3-mini")
    for rows in (160, 200, 256, 272, 320, 400, 512)
]
SERVING = "-serve-"
MODELS = ("llama", "gemma", "qwen", "mistral", "phi", "gpt", "glm", "deepseek")

Row = Mapping[str, Any]
Group = dict[str, Row]
Groups = dict[tuple[str, str, str], Group]


@cache
def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (BASELINES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def groups(name: str, op: str = "rope") -> Groups:
    """Correct, timed rows of an operation by (case, dtype, pass), then by provider."""
    found: Groups = defaultdict(dict)
    for row in rows_of(name):
        if row["op"] == op and row["status"] == "ok" and row["device_us"]:
            found[row["case"], row["dtype"], row["pass"]][row["provider"]] = row
    return found


def time(group: Group, provider: str) -> float:
    value = group[provider]["device_us"]
    assert isinstance(value, float)
    return value


def share(group: Group, provider: str) -> float:
    """Time of a copy of the same bytes over the provider's time, in percent; NaN if not measured."""
    return 100 * time(group, "floor-copy") / time(group, provider) if provider in group else math.nan


def fastest(group: Group, mine: bool) -> str:
    """The fastest fusewise provider, or the fastest other. A training step's forward has another result than the others'."""
    names = (p for p in group if p.startswith("fusewise") == mine and not p.startswith("floor"))
    return min((p for p in names if not p.endswith("-training")), key=partial(time, group))


def ours(group: Group) -> float:
    return time(group, fastest(group, mine=True))


def others(group: Group) -> float:
    return time(group, fastest(group, mine=False))


def against(group: Group) -> float:
    """Time of the fastest fusewise provider over that of the fastest other."""
    return ours(group) / others(group)


def published(case: str) -> bool:
    """Whether the case belongs to `rope-models`."""
    return case.startswith(MODELS) and SERVING not in case


def few_rows(case: str) -> bool:
    return "-decode-" in case or "-batch-" in case


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f} %"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"| --- |{' ---: |' * (len(names) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def folded(sentence: str, table: str) -> str:
    """A summary sentence, and the table in a collapsed section."""
    said = textwrap.fill(sentence.replace(" %", "\N{NO-BREAK SPACE}%"), 120, break_on_hyphens=False)
    return f"{said}\n\n<details><summary>The table</summary>\n\n{table}\n\n</details>"


def span(values: Iterable[float], form: str = ".0f") -> str:
    every = sorted(values)
    least, most = f"{every[0]:{form}}", f"{every[-1]:{form}}"
    return least if least == most else f"{least} to {most}"


def shares(found: Groups, pass_: str, shown: Mapping[str, str] = GPU) -> str:
    """Each provider's percentage of copy bandwidth, for the cases in SHOWN."""
    present = [p for p in shown if any(p in group for key, group in found.items() if key[2] == pass_)]
    rows = []
    for case, label in SHOWN.items():
        for (name, dtype, of), group in found.items():
            if (name, of) == (case, pass_):
                cells = [percent(share(group, provider)) for provider in present]
                rows.append([f"{label}, {dtype}", f"{time(group, 'floor-copy'):.1f}", *cells])
    # In backward, fusewise-cuda (like Liger) rotates the gradient in place.
    names = shown if pass_ == "fwd" else {**shown, "fusewise-cuda": "CUDA*"}
    return markdown([{"fwd": "forward", "bwd": "backward"}[pass_], "copy µs", *(names[p] for p in present)], rows)


def compiled(found: Groups) -> str:
    """fusewise against every compiler, over all cases of `rope-models`."""
    compilers = {name: word for name, word in COMPILERS.items() if not name.startswith("fusewise")}
    said = []
    for pass_, word in (("fwd", "forward"), ("bwd", "backward")):
        fastest, ratios = Counter[str](), []
        for (case, _, of), group in found.items():
            if of == pass_ and published(case):
                best = min((p for p in compilers if p in group), key=lambda p: time(group, p))
                fastest[compilers[best]] += 1
                ratios.append(ours(group) / time(group, best))
        ranks = ", ".join(f"{name} in {count}" for name, count in fastest.most_common())
        said.append(
            f"Over the {len(ratios)} {word} cases of `rope-models`, the fastest fusewise kernel takes "
            f"{geometric_mean(ratios):.2f} of the time of the fastest compiler (geometric mean; {span(ratios, '.2f')}), "
            f"which is {ranks}."
        )
    modes = {}
    for mode in ("max-autotune", "reduce-overhead"):
        beside = [group for group in found.values() if f"torch.compile-{mode}" in group]
        slower = (time(group, f"torch.compile-{mode}") / time(group, "torch.compile") for group in beside)
        modes[mode] = f"`{mode}` takes {span(slower, '.2f')}"
    said.append(
        f"In {len(beside)} cases torch.compile's other modes were measured, too: {' and '.join(modes.values())} times as long as its "
        "default."
    )
    shown = {"fusewise-triton": "Triton", "fusewise-cuda": "CUDA", **compilers}
    tables = (shares(found, pass_, shown) for pass_ in ("fwd", "bwd"))
    return "\n\n".join((textwrap.fill(" ".join(said), 120, break_on_hyphens=False), *tables))


def typical_host(found: Iterable[Group], provider: str) -> str:
    """The median host time of a provider, in µs."""
    return f"{median(float(group[provider]['host_us']) for group in found if provider in group):.0f}"


def host(found: Groups) -> str:
    """Host time per call: medians over the in-place serving cases."""
    groups = [group for (case, _, _), group in found.items() if SERVING in case]
    names = {"floor-triton-launch": "bare Triton launch", **GPU, "eager": "eager"}
    present = [p for p in names if any(p in group for group in groups)]
    cells = [f"{median(float(group[p]['host_us']) for group in groups if p in group):.1f}" for p in present]
    return markdown(
        [f"medians of {len(groups)} cases", *(names[p].rstrip("*") for p in present)],
        [["host µs per call", *cells]],
    )


def glance() -> str:
    """One line per operation and pass, in 16 bits: the fastest fusewise provider against the fastest other."""
    lines: tuple[tuple[str, str, Callable[[str], bool], str], ...] = (
        ("RoPE: training, prefill, decode", "rope", published, "fwd"),
        ("RoPE: training", "rope", published, "bwd"),
        ("RoPE in place, as serving engines call it", "rope", lambda case: SERVING in case, "fwd"),
        ("RoPE and the write to a paged KV cache", "rope_and_cache", lambda _: True, "fwd"),
        ("RMSNorm of q and k, and RoPE", "qk_norm_rope", lambda _: True, "fwd"),
        ("RMSNorm of q and k, and RoPE", "qk_norm_rope", lambda _: True, "bwd"),
        ("linear + GEGLU or SwiGLU: training", "geglu", lambda case: not few_rows(case), "fwd"),
        ("linear + GEGLU or SwiGLU: training", "geglu", lambda case: not few_rows(case), "fwd+bwd"),
        ("linear + GEGLU or SwiGLU: 1 to 512 rows", "geglu", few_rows, "fwd"),
        ("gated MLP: training", "gated_mlp", lambda _: True, "fwd+bwd"),
    )
    names = {name: word.rstrip("*") for name, word in {**GPU, **GATED, **MLP}.items()}
    rows = []
    for what, op, chosen, pass_ in lines:
        measured = in_float32(groups("h200", op), False)
        found = [group for (case, _, of), group in measured.items() if of == pass_ and chosen(case)]
        ratios = [against(group) for group in found]
        rivals = ", ".join(name for name, _ in Counter(names[fastest(g, mine=False)] for g in found).most_common())
        mean = f"**{geometric_mean(ratios):.2f}**"
        rows.append([f"{what}, {pass_}", str(len(found)), mean, span(ratios, ".2f"), rivals])
    return markdown(["time, fastest other = 1", "cases", "mean", "range", "fastest others"], rows)


def slowest(ratio: Mapping[str, float]) -> str:
    """The number of cases where fusewise is slower by more than 2 %, and their names."""
    slower = sorted(((value, case) for case, value in ratio.items() if value > 1.02), reverse=True)
    names = ": " + ", ".join(f"{case} ({100 * value - 100:.0f} %)" for value, case in slower)
    return f"{len(slower)}{names if slower else ''}"


def summary(found: Groups) -> str:
    """fusewise against the fastest other provider, over all cases of `rope-models` and over all head widths."""
    forward = {case: group for (case, _, pass_), group in found.items() if pass_ == "fwd" and published(case)}
    ratio = {case: against(group) for case, group in forward.items()}
    small = [ratio[case] for case in ratio if forward[case]["floor-copy"]["bytes_min"] < 64 * 2**20]
    backward = {case: against(group) for (case, _, pass_), group in found.items() if pass_ == "bwd" and published(case)}
    wide = [group for (case, _, _), group in found.items() if case.startswith("width-")]
    best = [100 * time(group, "floor-copy") / ours(group) for group in wide]
    faster = sum(others(group) < 0.99 * ours(group) for group in wide)
    return textwrap.fill(
        f"Over the {len(ratio)} forward cases of `rope-models`, the fastest fusewise kernel takes {geometric_mean(ratio.values()):.2f} "
        f"of the time of the fastest other provider (geometric mean), {geometric_mean(small):.2f} over the {len(small)} that move "
        f"less than 64 MiB; it is slower by more than 2 % in {slowest(ratio)}. Over the {len(backward)} backward cases it takes "
        f"{geometric_mean(backward.values()):.2f}, slower by more than 2 % in {slowest(backward)}; the gain is largest if only part of "
        "the head rotates, since an incoming gradient that nothing else references is rotated in place. Forward, at head widths of "
        "64, 80, 96, 112, 128, 160, 192 and 256 in bf16, fp16 and fp32, 390 to 775 MiB per call, the fastest fusewise kernel reaches "
        f"{min(best):.0f} to {max(best):.0f} % of the copy's rate, and another provider is faster by more than 1 % in {faster} of {len(wide)} rows.",
        120,
        break_on_hyphens=False,
    )


def serving(found: Groups) -> str:
    groups = {case: group for (case, _, _), group in found.items() if SERVING in case}
    ratio = {case: against(group) for case, group in groups.items()}
    worst = max(ratio, key=ratio.__getitem__)
    names = {p for group in groups.values() for p in group if not p.startswith(("fusewise", "floor"))}
    rivals = [GPU.get(p, p).rstrip("*") for p in (*GPU, "eager") if p in names]
    return textwrap.fill(
        f"In place, with the caches and positions of serving engines ({len(ratio)} cases of `rope-serving`, "
        f"{len({case.split(SERVING)[0] for case in ratio})} of its models, 1 to 8192 tokens), the faster of our two kernels takes "
        f"{geometric_mean(ratio.values()):.2f} of the time of the fastest of {', '.join(rivals[:-1])} and {rivals[-1]} "
        f"(geometric mean), and {max(ratio.values()):.2f} in the closest case ({worst}).",
        120,
        break_on_hyphens=False,
    )


def sweep(found: Groups) -> str:
    """fusewise against torch.compile over the sequence lengths of `rope-seqlen`."""
    said = []
    for of, name in (("fwd", "forward"), ("bwd", "backward")):
        groups = {
            int(case.split("-")[1]): g
            for (case, _, pass_), g in found.items()
            if case.startswith("seqlen-") and pass_ == of
        }
        ratios = [ours(g) / time(g, "torch.compile") for g in groups.values()]
        said.append(
            f"{geometric_mean(ratios):.2f} {name} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} "
            f"lengths from {min(groups)} to {max(groups)})"
        )
    return textwrap.fill(
        "In `rope-seqlen` (batch 32, 8 heads of 256, fp32) the faster of our kernels takes, relative to torch.compile, "
        + " and ".join(said)
        + ".",
        120,
    )


def by_products(found: Groups, cases: Sequence[str], names: Mapping[str, str]) -> str:
    """Time relative to the bare matmuls, and peak memory beyond the inputs."""
    shown = {key: group for key, group in found.items() if key[0] in cases}
    present = [p for p in names if any(p in group for group in shown.values())]
    rows = []
    for (case, dtype, pass_), group in sorted(shown.items(), key=lambda item: (cases.index(item[0][0]), *item[0][1:])):
        floor = time(group, "floor-matmul")
        cells = []
        for p in present:
            peak = group[p]["peak_bytes"] if p in group else None  # unknown where torch does not allocate
            memory = "" if peak is None else f" · {peak / 2**30:.2f}"
            cells.append(f"{time(group, p) / floor:.2f}{memory}" if p in group else "–")
        rows.append([f"{case}, {dtype} {pass_}", f"{floor / 1000:.2f}", *cells])
    return markdown(["× the matmul · GiB", "matmul ms", *(names[p] for p in present)], rows)


def among(found: Groups, provider: str) -> Groups:
    """The comparisons in which `provider` took part."""
    return {key: group for key, group in found.items() if provider in group}


def in_float32(found: Groups, whether: bool = True) -> Groups:
    """The comparisons in float32, also with matmuls in tf32, or all others."""
    return {key: group for key, group in found.items() if (key[1] in ("fp32", "tf32")) == whether}


def gelu() -> str:
    """GELU by every compiler on an H100, for one size bound by launching and those that leave the caches; and what was not
    right."""
    shown = {"eager": "eager", "aten-gelu": "PyTorch's gelu", "torchscript": "TorchScript", "torch.compile": "torch.compile",
             "thunder": "Thunder", "thunder-torchcompile": "Thunder, torch.compile", "jax": "JAX", "tvm": "TVM"}  # fmt: skip
    every = {(r["case"], r["pass"], r["provider"]): r for r in rows_of("h100") if r["op"] == "gelu"}
    lines = []
    for case in ("gelu-256", "gelu-2048", "gelu-4096", "gelu-16384"):
        for pass_ in ("fwd", "bwd"):
            copy = every[case, pass_, "floor-copy"]
            cells = []
            for provider in shown:
                row = every[case, pass_, provider]
                cells.append(
                    f"{row['device_us']:,.1f}" if row["status"] == "ok" else row["status"].replace("missing", "–")
                )
            lines.append([f"{case} {pass_}", f"{copy['bytes_min'] / 2**20:,.1f}", f"{copy['device_us']:,.1f}", *cells])
    return markdown(["µs", "MiB", "copy", *shown.values()], lines)


def gated_widths(found: Groups) -> str:
    """All of `geglu-memory` in bfloat16 by width d: times and peaks of memory, smallest to largest over the row counts."""
    names = re.compile(r"memory-n(\d+)-d(\d+)")
    cases = {
        (*map(int, m.groups()), of): group
        for (case, dtype, of), group in found.items()
        if dtype == "bf16" and (m := names.fullmatch(case))
    }
    columns = (
        ("forward: time over torch.compile's", "fwd", "device_us", "fusewise-cuda", "torch.compile"),
        ("over the matmul's", "fwd", "device_us", "fusewise-cuda", "floor-matmul"),
        ("peak over torch.compile's", "fwd", "peak_bytes", "fusewise-cuda", "torch.compile"),
        ("with backward: time over torch.compile's", "fwd+bwd", "device_us", "fusewise-cuda", "torch.compile"),
        ("peak over Liger's", "fwd+bwd", "peak_bytes", "fusewise-cuda", "liger"),
        ("recomputing: time over torch.compile's", "fwd+bwd", "device_us", "fusewise-cuda-recompute", "torch.compile"),
        ("peak over Liger's", "fwd+bwd", "peak_bytes", "fusewise-cuda-recompute", "liger"),
    )
    rows = []
    for d in sorted({d for _, d, _ in cases}):
        cells = []
        for _, pass_, field, mine, other in columns:
            groups = [
                g for (_, width, of), g in cases.items() if (width, of) == (d, pass_) and mine in g and other in g
            ]
            cells.append(span((g[mine][field] / g[other][field] for g in groups), ".2f"))
        rows.append([str(d), *cells])
    saved = {}
    for (n, d, of), group in cases.items():
        if of == "fwd+bwd" and "eager" in group:
            held = group["eager"]["held_bytes"] - group["fusewise-cuda"]["held_bytes"]
            saved[n / (2 * (d + 1))] = held / (2 * (8 * d * d + 8 * d))
    right = sum(math.isclose(predicted, got, rel_tol=1e-3) for predicted, got in saved.items())
    passes = Counter(of for *_, of in cases)
    sentence = (
        f"Over all of `geglu-memory`, N = 1024 to 65536 by width d ({passes['fwd']} cases forward, {passes['fwd+bwd']} with backward): "
        f"time and peak memory relative to others. Between forward and backward fusewise holds less than eager code, by "
        f"N / (2 (d + 1)) of the parameters' bytes ({min(saved):.2g} to {max(saved):.2g}): as predicted in {right} of {len(saved)} cases."
    )
    table = markdown(["d", *(column[0] for column in columns)], rows)
    return f"{textwrap.fill(sentence, 120, break_on_hyphens=False)}\n\n{table}"


def gated_decode(found: Groups) -> str:
    shown = [(case, dtype, group) for (case, dtype, _), group in found.items() if case in DECODED]
    present = [p for p in GATED if any(p in group for _, _, group in shown)]
    rows = []
    for case, dtype, group in sorted(shown, key=lambda item: DECODED.index(item[0])):
        cells = [percent(share(group, provider)) for provider in ("floor-matmul", *present)]
        rows.append([f"{case}, {dtype}", f"{time(group, 'floor-copy'):.1f}", *cells])
    few = [group for case, _, group in shown if not case.endswith("-b128")]
    many = [group for case, _, group in shown if case.endswith("-b128")]
    slower = sum(time(group, "fusewise-cuda") > time(group, "torch.compile") for group in many)

    on_host = partial(typical_host, [group for _, _, group in shown])
    sentence = (
        f"Up to 64 rows: {span(share(g, 'fusewise-cuda') for g in few)} %, and "
        f"{span((others(g) / time(g, 'fusewise-cuda') for g in few), '.2f')} times as fast as the faster of torch.compile "
        f"and eager. At 128 rows: {span(share(g, 'fusewise-cuda') for g in many)} %, and slower than torch.compile in {slower} "
        f"of {len(many)}. Host time per call (medians): fusewise {on_host('fusewise-cuda')} µs, torch.compile {on_host('torch.compile')}, "
        f"eager {on_host('eager')}, the matmul alone {on_host('floor-matmul')}."
    )
    return folded(sentence, markdown(["forward", "copy µs", "matmul", *(GATED[p] for p in present)], rows))


def gated_batches(found: Groups) -> str:
    shown = [(case, dtype, group) for (case, dtype, _), group in found.items() if case in BATCHED]
    names = {**TRAINED, "fusewise-cuda": "in CUDA"}
    present = [p for p in names if any(p in group for _, _, group in shown)]
    rows = []
    for case, dtype, group in sorted(shown, key=lambda item: BATCHED.index(item[0])):
        floor = time(group, "floor-matmul")
        cells = [f"{time(group, p) / floor:.2f}" for p in present]
        rows.append([f"{case}, {dtype}", f"{floor:.1f}", *cells])

    def over(choose: Callable[[Group], float]) -> str:
        return span((choose(group) / time(group, "floor-matmul") for _, _, group in shown), ".2f")

    sentence = (
        f"With 160 to 512 rows, the fastest of ours takes {over(ours)} of the matmul's time, torch.compile "
        f"{over(lambda g: time(g, 'torch.compile'))}, Liger {over(lambda g: time(g, 'liger'))}."
    )
    return folded(sentence, markdown(["× the matmul, forward", "matmul µs", *(names[p] for p in present)], rows))


def normed(found: Groups) -> str:
    shown = {
        "fusewise-cuda": "in CUDA", "fusewise-triton": "in Triton", "vllm": "vLLM", "torch.compile": "torch.compile", "eager": "eager"
    }  # fmt: skip
    rows = [
        [
            f"{case}, {dtype} {pass_}",
            f"{time(group, 'floor-copy'):.1f}",
            *(percent(share(group, p)) if p in group else "–" for p in shown),
        ]
        for (case, dtype, pass_), group in found.items()
    ]
    few = [g for (*_, pass_), g in found.items() if pass_ == "fwd" and g["floor-copy"]["bytes_min"] < 64 * 2**20]
    beside = [g for g in found.values() if "vllm" in g]
    on_host = partial(typical_host, few)

    def of(provider: str, pass_: str) -> str:
        large = [g for (*_, name), g in found.items() if name == pass_ and g["floor-copy"]["bytes_min"] >= 64 * 2**20]
        return span(share(g, provider) for g in large)

    sentence = (
        f"From 64 MiB on, CUDA reaches {of('fusewise-cuda', 'fwd')} % forward (torch.compile {of('torch.compile', 'fwd')}) and "
        f"{of('fusewise-cuda', 'bwd')} % backward (Triton {of('fusewise-triton', 'bwd')}, torch.compile "
        f"{of('torch.compile', 'bwd')}). Below, CUDA takes "
        f"{span((time(g, 'fusewise-cuda') / time(g, 'fusewise-triton') for g in few), '.2f')} of Triton's time; in all cases that vLLM "
        f"serves, {span((time(g, 'fusewise-cuda') / time(g, 'vllm') for g in beside), '.2f')} of vLLM's. Host time per call (medians): "
        f"CUDA {on_host('fusewise-cuda')} µs, Triton {on_host('fusewise-triton')}, vLLM {on_host('vllm')}, torch.compile "
        f"{on_host('torch.compile')}."
    )
    return folded(sentence, markdown(["RMSNorm and RoPE of q and k", "copy µs", *shown.values()], rows))


def cached(found: Groups) -> str:
    """Rotation plus KV cache write: one fusewise call, or a library's calls in sequence."""
    shown = {"fusewise-cuda": "fusewise", "vllm": "vLLM, two calls", "torch.compile": "torch.compile", "eager": "eager"}
    rows = [
        [f"{case}, {dtype}", *(f"{time(group, p):.1f}" if p in group else "–" for p in ("floor-copy", *shown))]
        for (case, dtype, _), group in found.items()
    ]
    times = [(time(g, "fusewise-cuda"), g) for g in found.values()]
    beside = [(t, g) for t, g in times if "vllm" in g]
    sentence = (
        f"In {len(times)} cases it takes {span((t / time(g, 'floor-copy') for t, g in times), '.2f')} of the time of a copy of the "
        f"same bytes. In the {len(beside)} where vLLM was measured too, it is {span((time(g, 'vllm') / t for t, g in beside), '.1f')} "
        "times as fast as vLLM's two calls."
    )
    return folded(sentence, markdown(["device µs", "copy", *shown.values()], rows))


def behind() -> str:
    """The comparisons in which another provider is more than 1 % faster than all of ours, farthest first."""
    compared = {
        (op, *key): group
        for op in ("rope", "rope_and_cache", "qk_norm_rope", "geglu", "gated_mlp")
        for key, group in groups("h200", op).items()
    }
    ahead = {key: group for key, group in compared.items() if against(group) > 1.01}
    rows = []
    for (op, case, dtype, pass_), group in sorted(ahead.items(), key=lambda item: -against(item[1])):
        mine, other = fastest(group, mine=True), fastest(group, mine=False)
        verdict = group[mine]["verdict_vs_best_other"]
        cells = [f"{time(group, mine):,.0f}", f"{time(group, mine) / time(group, other):.3f}"]
        rows.append([f"{op} {case}, {dtype} {pass_}", other, mine, *cells, verdict])
    worse = sum(row[-1] == "slower" for row in rows)
    sentence = (
        f"In {len(rows)} of {len(compared)} comparisons another provider is more than 1 % faster than the fastest of ours; by the "
        f"study's verdict ours is *slower* in {worse} of these."
    )
    header = ["", "fastest other", "fastest of ours", "its µs", "over the other's", "verdict"]
    return folded(sentence, markdown(header, rows))


def cpu(found: Groups, shown: dict[str, str]) -> str:
    rows = []
    for (case, dtype, pass_), group in found.items():
        moved = group["floor-copy"]["bytes_min"] / 2**20
        cells = [f"{time(group, p):,.0f}" if p in group else "–" for p in ("floor-copy", *shown)]
        rows.append([f"{case} {dtype} {pass_}", f"{moved:.1f}", *cells])
    return markdown(["µs per call", "MiB moved", "copy", *shown.values()], rows)


def cpu_gated(found: Groups, shown: dict[str, str]) -> str:
    rows = []
    for (case, dtype, pass_), group in found.items():
        cells = [f"{time(group, p) / 1000:.2f}" if p in group else "–" for p in ("floor-matmul", *shown)]
        rows.append([f"{case} {dtype} {pass_}", *cells])
    beside = [time(g, "fusewise-cpu") / time(g, "torch.compile") for g in found.values() if "torch.compile" in g]
    where = "" if len(beside) == len(found) else " where torch.compile was right"
    sentence = f"fusewise takes {span(beside, '.2f')} of the time of torch.compile{where}."
    return "\n\n".join((sentence, markdown(["ms per call", "matmul", *shown.values()], rows)))


def parts() -> dict[str, str]:
    """The text between `<!-- NAME -->` and `<!-- /NAME -->` on the pages, by name."""
    gpu = groups("h200")
    return {
        "h200-glance": glance(),
        "h200-forward": shares(gpu, "fwd"),
        "h200-backward": shares(gpu, "bwd"),
        "h200-host": host(gpu),
        "h200-summary": summary(gpu),
        "h200-serving": serving(gpu),
        "h200-sweep": sweep(gpu),
        "h200-cached": cached(groups("h200", "rope_and_cache")),
        "h200-gated": by_products(in_float32(groups("h200", "geglu"), False), GATED_SHOWN, TRAINED),
        "h200-float32": by_products(in_float32(groups("h200", "geglu")), (*GATED_SHOWN, *SHAPES), FLOAT32),
        "h200-kept": by_products(among(groups("h200", "geglu"), "fusewise-cuda-training"), GATED_SHOWN, KEPT),
        "h100-kept": by_products(among(groups("h100", "geglu"), "fusewise-cuda-training"), GATED_SHOWN, KEPT),
        "h100-gated": by_products(among(groups("h100", "geglu"), "torch.compile-max-autotune"), GATED_SHOWN, EVERY),
        "h100-gelu": gelu(),
        "h200-gated-widths": gated_widths(groups("h200", "geglu")),
        "h200-mlp": by_products(groups("h200", "gated_mlp"), MLP_SHOWN, MLP),
        "h200-gated-decode": gated_decode(groups("h200", "geglu")),
        "h200-gated-batches": gated_batches(groups("h200", "geglu")),
        "h100": compiled(groups("h100")),
        "h200-normed": normed(groups("h200", "qk_norm_rope")),
        "h200-behind": behind(),
        "epyc": cpu(groups("cpu-epyc"), COMPILERS),
        "epyc-gated": cpu_gated(groups("cpu-epyc", "geglu"), COMPILERS),
        "xeon": cpu(groups("cpu"), CPU),
        "xeon-gated": cpu_gated(groups("cpu", "geglu"), CPU),
    }


def filled(pages: Mapping[Path, str]) -> dict[Path, str]:
    """The pages with regenerated parts."""
    texts = dict(pages)
    for name, part in parts().items():
        count = 0
        for page, text in texts.items():
            texts[page], places = re.subn(
                rf"(?s)(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", lambda m, part=part: m[1] + part + m[2], text
            )
            count += places
        if count != 1:
            where = " or ".join(str(page.relative_to(ROOT)) for page in pages)
            raise ValueError(f"readme: <!-- {name} --> must stand once in {where}, got {count}; put it back")
    return texts


def figure(found: Groups) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [(case, group) for (case, _, name), group in found.items() if name == "fwd" and case.endswith("-train")]
    providers = [p for p in GPU if any(p in group for _, group in chosen)]
    width = 0.8 / len(providers)
    plot, axes = plt.subplots(figsize=(11, 4.2))
    for i, provider in enumerate(providers):
        places = [x + (i - len(providers) / 2 + 0.5) * width for x in range(len(chosen))]
        heights = [share(group, provider) for _, group in chosen]
        label = ("fusewise " if provider.startswith("fusewise") else "") + GPU[provider]
        axes.bar(places, heights, width, label=label, color=COLOURS[provider])
    axes.axhline(100, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(chosen)), [case.removesuffix("-train") for case, _ in chosen], rotation=20, ha="right")
    axes.set_ylabel("% of the rate of a copy")
    axes.set_title("RoPE forward, training shapes, H200 (* in place: moves less where only a part of the head rotates)")
    axes.legend(ncols=5, fontsize=8, loc="upper left")
    axes.set_ylim(0, 280)
    plot.tight_layout()
    plot.savefig(ROOT / "docs" / "rope-h200.png", dpi=110)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page, text in filled({page: page.read_text(encoding="utf-8") for page in PAGES}).items():
        page.write_text(text, encoding="utf-8")
    figure(groups("h200"))
