"""The figure and the tables of the README, made from the published rows: `python benchmarks/figure.py`.

Writes docs/rope-h200.png and prints the tables as Markdown.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "baselines" / "h200.jsonl"
OURS = "fusewise-triton"
SHOWN = {
    OURS: "fusewise",
    "fusewise-triton-inplace": "fusewise*",
    "torch.compile": "torch.compile",
    "liger": "Liger*",
    "flash_attn": "flash-attn",
    "quack": "QuACK",
    "flashinfer": "FlashInfer*",
    "vllm": "vLLM*",
    "transformer_engine-fused": "TransformerEngine",
}
COLOURS = {OURS: "#111111", "fusewise-triton-inplace": "#888888"}
Group = dict[str, dict[str, object]]


def groups() -> dict[tuple[str, str, str], Group]:
    """Right and timed rows by (case, dtype, pass), then by provider."""
    found: dict[tuple[str, str, str], Group] = defaultdict(dict)
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        if row["status"] == "ok" and row["device_us"]:
            found[row["case"], row["dtype"], row["pass"]][row["provider"]] = row
    return found


def share(group: Group, provider: str) -> float | None:
    """Time of a copy of the same bytes over the provider's time, in percent."""
    if provider not in group:
        return None
    copy, time = group["floor-copy"]["device_us"], group[provider]["device_us"]
    assert isinstance(copy, float) and isinstance(time, float)
    return 100 * copy / time


def table(title: str, found: dict[tuple[str, str, str], Group], keep: str, pass_: str) -> None:
    print(f"\n{title}\n\n| case | copy µs | {' | '.join(SHOWN.values())} |\n| --- |{' ---: |' * (len(SHOWN) + 1)}")
    for (case, dtype, name), group in found.items():
        if name != pass_ or keep not in case:
            continue
        shares = [share(group, provider) for provider in SHOWN]
        cells = ["–" if value is None else f"{value:.0f} %" for value in shares]
        copy = group["floor-copy"]["device_us"]
        print(f"| {case} {dtype} | {copy:.1f} | {' | '.join(cells)} |")


def figure(found: dict[tuple[str, str, str], Group]) -> None:
    chosen = [(case, group) for (case, _, name), group in found.items() if name == "fwd" and case.endswith("-train")]
    width = 0.8 / len(SHOWN)
    plot, axes = plt.subplots(figsize=(11, 4.2))
    for i, (provider, label) in enumerate(SHOWN.items()):
        heights = [share(group, provider) or math.nan for _, group in chosen]
        places = [x + (i - len(SHOWN) / 2 + 0.5) * width for x in range(len(chosen))]
        axes.bar(places, heights, width, label=label, color=COLOURS.get(provider))
    axes.axhline(100, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(chosen)), [case.removesuffix("-train") for case, _ in chosen], rotation=20, ha="right")
    axes.set_ylabel("% of the rate of a copy")
    axes.set_title("RoPE forward, training shapes, H200 (* in place: moves less where only a part of the head rotates)")
    axes.legend(ncols=5, fontsize=8, loc="upper left")
    axes.set_ylim(0, 260)
    plot.tight_layout()
    plot.savefig(ROOT / "docs" / "rope-h200.png", dpi=110)


def main() -> None:
    found = groups()
    figure(found)
    table("Training, forward", found, "-train", "fwd")
    table("Training, backward", found, "-train", "bwd")
    table("Prefill of 8192 tokens", found, "-prefill-8k", "fwd")
    table("Decode, batch 64", found, "-decode-b64", "fwd")
    table("Head widths", found, "width-", "fwd")


if __name__ == "__main__":
    main()
