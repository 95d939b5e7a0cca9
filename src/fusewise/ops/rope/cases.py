"""Named RoPE cases, shared by tests, benchmarks, the study and the reports: shapes, inputs, bytes and flops.

    cases("rope-models")  -> list of RopeCase        case("llama-3-8b-train") -> RopeCase
    inputs = c.make_inputs("cuda", "bf16", seed=0)   fusewise.rope(*inputs.operands, **inputs.kwargs)

Presets: `rope-cube` (batch = seq = heads = head_dim), `rope-seqlen` (a sweep of the sequence length), `rope-models` (nine
published models in training, prefill and decode), `rope-serving` (the same models as a serving engine calls RoPE: in
place on flat tokens), `rope-serving-quick` (four of these), `rope-widths` (head widths from 64 to 256, about 390 MiB each at
bf16) and `rope-quick` (minutes on a laptop).
"""

from __future__ import annotations

from .._cases import of_name, of_preset
from ._case import RopeCase, RopeInputs
from ._models import MODELS, model_case, serving_case

__all__ = ["PRESETS", "RopeCase", "RopeInputs", "case", "cases"]


def _models() -> list[RopeCase]:
    found = []
    for name, model in MODELS.items():
        found.append(model_case(name, "train", *model.train, "train"))
        found.append(model_case(name, "prefill-8k", 1, 8192, "prefill"))
        found += [model_case(name, f"decode-b{batch}", batch, 1, "decode") for batch in (1, 64, 256)]
    return found


def _serving() -> list[RopeCase]:
    """All decode batches and prefill chunks for 32/8 heads of 128 (Llama 3 8B); fewer chunks for the other models."""
    found = []
    for name in MODELS:
        chunks = [128 * 2**k for k in range(7)] if name == "llama-3-8b" else [128, 1024, 8192]
        found += [serving_case(name, batch) for batch in (1, 8, 64, 256, 1024)]
        found += [serving_case(name, 1, chunk) for chunk in chunks]
    return found


def _cube(n: int) -> RopeCase:
    return RopeCase(name=f"cube-{n}", batch=n, seqlen=n, heads=n, head_dim=n)


def _seqlen(seqlen: int) -> RopeCase:
    return RopeCase(name=f"seqlen-{seqlen}", batch=32, seqlen=seqlen, heads=8, head_dim=256)


def _width(head_dim: int) -> RopeCase:
    # about 96 Mi elements of q and k whatever the width: with the table 390 MiB move at bf16 and fp16, 772 at fp32
    seqlen = 96 * 2**20 // (40 * head_dim) // 256 * 256
    return RopeCase(
        name=f"width-{head_dim}",
        batch=1,
        seqlen=seqlen,
        heads=32,
        kv_heads=8,
        head_dim=head_dim,
        dtypes=("bf16", "fp16", "fp32"),
    )


def _quick() -> list[RopeCase]:
    return [
        _cube(32),  # 8 MiB
        _seqlen(128),  # 64 MiB and the table
        model_case("llama-3-8b", "step-4k", 1, 4096, "train"),  # 80 MiB and the table
        model_case("glm-4-9b", "step-512", 1, 512, "train"),  # 8.5 MiB, interleaved, half of the head rotates
        model_case("llama-3-8b", "decode-b64", 64, 1, "decode"),  # 1.3 MiB
    ]


PRESETS: dict[str, list[RopeCase]] = {
    "rope-cube": [_cube(n) for n in range(4, 65, 2)],
    "rope-seqlen": [_seqlen(seqlen) for seqlen in range(32, 2049, 32)],
    "rope-models": _models(),
    "rope-serving": _serving(),
    "rope-serving-quick": [
        *(serving_case("llama-3-8b", batch) for batch in (1, 64)),
        serving_case("llama-3-8b", 1, 512),
        serving_case("glm-4-9b", 64),  # half of the head, interleaved
    ],
    "rope-widths": [_width(head_dim) for head_dim in (64, 80, 96, 112, 128, 160, 192, 256)],
    "rope-quick": _quick(),
}


def cases(preset: str) -> list[RopeCase]:
    """The cases of a preset, in the order of its table."""
    return of_preset("rope_cases", PRESETS, preset)


def case(name: str) -> RopeCase:
    """The case of that name, from whichever preset has it."""
    return of_name("rope_cases", PRESETS, name)
