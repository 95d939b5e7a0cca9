"""The RoPE cases that tests, benchmarks, the study and the reports share: shapes, inputs, bytes and flops by name.

    cases("rope-models")  -> list of RopeCase        case("llama-3-8b-train") -> RopeCase
    inputs = c.make_inputs("cuda", "bf16", seed=0)   fusewise.rope(*inputs.operands, **inputs.kwargs)

Presets: `rope-cube` (batch = seq = heads = head_dim), `rope-seqlen` (a sweep of the sequence length), `rope-models` (nine
published models in training, prefill and decode), `rope-widths` (head widths from 64 to 256, 384 MiB each at bf16) and
`rope-quick` (minutes on a laptop). Shape legend: B batch, T tokens of a sequence, H heads, D head width, P rotated pairs,
R table rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from . import tables

Pass = Literal["fwd", "bwd", "fwd+bwd"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RopeInputs:
    """The tensors of one case: what is rotated, the table, positions, and one upstream gradient for each output."""

    q: Tensor
    k: Tensor | None
    cos: Tensor  # (R, P) float32, half width
    sin: Tensor
    positions: Tensor | None  # int64 (B, T); None: 0 … T-1, plus offset
    dq: Tensor
    dk: Tensor | None
    kwargs: dict[str, Any]  # keyword arguments of `fusewise.rope`, right for q and k together and for either alone

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """q, and k where there is one."""
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The upstream gradient of every operand, in their order."""
        return (self.dq,) if self.dk is None else (self.dq, self.dk)


@dataclass(frozen=True, kw_only=True)
class RopeCase:
    """One named RoPE problem. All counts follow from the mathematics, none from an implementation."""

    name: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int = 0  # heads of k; 0: q alone
    head_dim: int
    k_head_dim: int = 0  # 0: as q
    rotary_dim: int = 0  # 0: the whole head
    rotary_start: int = 0  # first rotated feature; negative counts from the end of each head
    pairing: Literal["half", "interleaved", "interleaved_to_half"] = "half"
    layout: Literal["bshd", "sbhd", "bhsd"] = "bshd"
    positions: Literal["arange", "offset", "ids"] = "arange"
    offset: int = 0  # position of the first token where positions is "offset"
    table_rows: int = 0  # 0: offset + seqlen
    rope_parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)  # transformers' keys
    dtypes: tuple[str, ...] = ("fp32",)
    passes: tuple[Pass, ...] = ("fwd", "bwd")
    regime: Literal["train", "prefill", "decode", "sweep"] = "sweep"
    model: str = ""  # the published configuration it comes from; "": synthetic

    @property
    def rotated(self) -> int:
        """Rotated features of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def rows(self) -> int:
        """Rows of the cos and sin table."""
        return self.table_rows or self.offset + self.seqlen

    @property
    def q_shape(self) -> tuple[int, ...]:
        return self._shape(self.heads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...] | None:
        return self._shape(self.kv_heads, self.k_head_dim or self.head_dim) if self.kv_heads else None

    @property
    def shape(self) -> str:
        """The shape in words, as records and reports show it."""
        shapes = [("q", self.q_shape)] + ([("k", self.k_shape)] if self.k_shape else [])
        words = [f"{name}[{','.join(map(str, sizes))}]" for name, sizes in shapes]
        if self.rotated != self.head_dim or self.rotary_start:
            words.append(f"rotary {self.rotated}{' trailing' if self.rotary_start < 0 else ''}")
        return " ".join([*words, self.layout, self.pairing])

    @property
    def elements(self) -> int:
        """Elements of q and k together."""
        k_width = self.kv_heads * (self.k_head_dim or self.head_dim)
        return self.batch * self.seqlen * (self.heads * self.head_dim + k_width)

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Bytes that must cross the memory: q and k (or their gradients) read once and written once, out of place, features
        that pass through included; every table row in use read once in float32; position ids read once."""
        table_rows = min(self.rows, self.batch * self.seqlen) if self.positions == "ids" else self.seqlen
        table = table_rows * self.rotated * 4  # P cosines and P sines of a row
        ids = self.batch * self.seqlen * 8 if self.positions == "ids" else 0
        return _passes(direction) * (2 * self.output_bytes(dtype) + table + ids)

    def flops_min(self, direction: Pass) -> int:
        """Four multiplications, one addition and one subtraction for each pair."""
        pairs = self.batch * self.seqlen * (self.heads + self.kv_heads) * self.rotated // 2
        return _passes(direction) * 6 * pairs

    def output_bytes(self, dtype: str) -> int:
        """Memory that a call must allocate: the outputs (or the input gradients), nothing else. Nothing has to be held for
        backward."""
        return self.elements * DTYPES[dtype].itemsize

    def frequencies(self) -> tuple[Tensor, float]:
        """`(inv_freq, scaling)` of the case's rope_parameters, on the CPU."""
        return tables.from_config(
            {key: value for key, value in self.rope_parameters.items() if key != "partial_rotary_factor"}, self.rotated
        )

    def make_inputs(self, device: torch.device | str, dtype: str, seed: int = 0) -> RopeInputs:
        """The case's tensors: standard normal q, k and gradients, contiguous in the case's layout.

        Drawn on `device` itself, since the large cases hold gigabytes, by a generator of that device seeded from `seed` and
        the case's name. So they are the same tensors in every process on one kind of device and version of torch, and other
        ones on a GPU than on a CPU. Position ids are distinct random rows of the table, drawn on the CPU.
        """
        generator = torch.Generator(device).manual_seed(_seed(self.name, seed))

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[dtype])

        q, dq = normal(self.q_shape), normal(self.q_shape)
        k, dk = (normal(self.k_shape), normal(self.k_shape)) if self.k_shape else (None, None)
        inverse, scaling = self.frequencies()
        cos, sin = tables.cos_sin(inverse, self.rows, scaling=scaling, device=device)
        kwargs: dict[str, Any] = {"cos": cos, "sin": sin, "layout": self.layout, "pairing": self.pairing}
        if self.rotated != self.head_dim:
            kwargs |= {"rotary_dim": self.rotated, "rotary_start": self.rotary_start}
        positions = None
        if self.positions == "ids":
            ids = torch.Generator().manual_seed(_seed(self.name + "/positions", seed))
            drawn = torch.randperm(self.rows, generator=ids)[: self.batch * self.seqlen]
            positions = kwargs["positions"] = drawn.view(self.batch, self.seqlen).to(device)
        elif self.positions == "offset":
            kwargs["offset"] = self.offset
        return RopeInputs(q, k, cos, sin, positions, dq, dk, kwargs)

    def _shape(self, heads: int, width: int) -> tuple[int, ...]:
        sizes = {"b": self.batch, "s": self.seqlen, "h": heads, "d": width}
        return tuple(sizes[letter] for letter in self.layout)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The fields of a published configuration (config.json of the named checkpoint) that decide its RoPE."""

    checkpoint: str
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # max_position_embeddings
    rope: Mapping[str, Any]
    dtype: str = "bf16"  # torch_dtype
    rotary_dim: int = 0
    rotary_start: int = 0
    k_head_dim: int = 0
    pairing: Literal["half", "interleaved", "interleaved_to_half"] = "half"
    train: tuple[int, int] = (4, 4096)  # batch and sequence length: 16384 tokens a device and step


# Values: the checkpoint's config.json. Mistral and Qwen2.5 publish no scaling of the frequencies for their native context.
_MODELS = {
    "llama-3-8b": _Model(
        checkpoint="meta-llama/Meta-Llama-3-8B",
        heads=32,
        kv_heads=8,
        head_dim=128,  # hidden_size 4096 / 32
        context=8192,
        rope={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "gemma-7b": _Model(
        checkpoint="google/gemma-7b",
        heads=16,
        kv_heads=16,
        head_dim=256,
        context=8192,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gemma-2-9b": _Model(
        checkpoint="google/gemma-2-9b",
        heads=16,
        kv_heads=8,
        head_dim=256,
        context=8192,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen2.5-7b": _Model(
        checkpoint="Qwen/Qwen2.5-7B",
        heads=28,
        kv_heads=4,
        head_dim=128,  # hidden_size 3584 / 28
        context=131072,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "mistral-7b": _Model(
        checkpoint="mistralai/Mistral-7B-v0.3",
        heads=32,
        kv_heads=8,
        head_dim=128,  # hidden_size 4096 / 32
        context=32768,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "phi-2": _Model(
        checkpoint="microsoft/phi-2",
        heads=32,
        kv_heads=32,
        head_dim=80,  # hidden_size 2560 / 32
        rotary_dim=32,  # partial_rotary_factor 0.4
        context=2048,
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        dtype="fp16",
        train=(8, 2048),
    ),
    "gpt-neox-20b": _Model(
        checkpoint="EleutherAI/gpt-neox-20b",
        heads=64,
        kv_heads=64,
        head_dim=96,  # hidden_size 6144 / 64
        rotary_dim=24,  # rotary_pct 0.25
        context=2048,
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        dtype="fp16",
        train=(8, 2048),
    ),
    "glm-4-9b": _Model(
        checkpoint="THUDM/glm-4-9b-chat",
        heads=32,
        kv_heads=2,  # multi_query_group_num
        head_dim=128,  # kv_channels
        rotary_dim=64,  # half of kv_channels, adjacent pairs
        context=131072,
        rope={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},  # 10000 * rope_ratio 500
        pairing="interleaved",
    ),
    "deepseek-v3": _Model(
        checkpoint="deepseek-ai/DeepSeek-V3",
        heads=128,
        kv_heads=1,  # one key of qk_rope_head_dim features, shared by all heads
        head_dim=192,  # qk_nope_head_dim 128, then qk_rope_head_dim 64
        k_head_dim=64,
        rotary_dim=64,
        rotary_start=-64,
        context=163840,
        rope={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        pairing="interleaved_to_half",  # adjacent pairs in the weights, halves in the published code's output
        train=(2, 4096),
    ),
}


def _model_case(
    name: str,
    suffix: str,
    batch: int,
    seqlen: int,
    regime: Literal["train", "prefill", "decode"],
) -> RopeCase:
    model = _MODELS[name]
    return RopeCase(
        name=f"{name}-{suffix}",
        model=model.checkpoint,
        regime=regime,
        batch=batch,
        seqlen=seqlen,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        k_head_dim=model.k_head_dim,
        rotary_dim=model.rotary_dim,
        rotary_start=model.rotary_start,
        pairing=model.pairing,
        # a decode step rotates one token of each sequence, anywhere in the model's context up to 8192
        positions="ids" if regime == "decode" else "arange",
        table_rows=min(model.context, 8192) if regime == "decode" else 0,
        rope_parameters=model.rope,
        dtypes=(model.dtype,),
        passes=("fwd", "bwd") if regime == "train" else ("fwd",),
    )


def _models() -> list[RopeCase]:
    found = []
    for name, model in _MODELS.items():
        found.append(_model_case(name, "train", *model.train, "train"))
        found.append(_model_case(name, "prefill-8k", 1, 8192, "prefill"))
        found += [_model_case(name, f"decode-b{batch}", batch, 1, "decode") for batch in (1, 64, 256)]
    return found


def _cube(n: int) -> RopeCase:
    return RopeCase(name=f"cube-{n}", batch=n, seqlen=n, heads=n, head_dim=n)


def _seqlen(seqlen: int) -> RopeCase:
    return RopeCase(name=f"seqlen-{seqlen}", batch=32, seqlen=seqlen, heads=8, head_dim=256)


def _width(head_dim: int) -> RopeCase:
    # about 96 Mi elements of q and k whatever the width: 384 MiB move at bf16 and fp16, 768 MiB at fp32
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
        _model_case("llama-3-8b", "step-4k", 1, 4096, "train"),  # 80 MiB and the table
        _model_case("glm-4-9b", "step-512", 1, 512, "train"),  # 8.5 MiB, interleaved, half of the head rotates
        _model_case("llama-3-8b", "decode-b64", 64, 1, "decode"),  # 1.3 MiB
    ]


PRESETS: dict[str, list[RopeCase]] = {
    "rope-cube": [_cube(n) for n in range(4, 65, 2)],
    "rope-seqlen": [_seqlen(seqlen) for seqlen in range(32, 2049, 32)],
    "rope-models": _models(),
    "rope-widths": [_width(head_dim) for head_dim in (64, 80, 96, 112, 128, 160, 192, 256)],
    "rope-quick": _quick(),
}


def cases(preset: str) -> list[RopeCase]:
    """The cases of a preset, in the order of its table."""
    if preset not in PRESETS:
        raise ValueError(f"rope_cases: preset must be one of {', '.join(PRESETS)}, got {preset!r}; choose one")
    return list(PRESETS[preset])


def case(name: str) -> RopeCase:
    """The case of that name, from whichever preset has it."""
    for preset in PRESETS.values():
        for found in preset:
            if found.name == name:
                return found
    raise ValueError(
        f"rope_cases: name must be that of a case in a preset, got {name!r}; list them with cases(preset) for one of "
        f"{', '.join(PRESETS)}"
    )


def _passes(direction: Pass) -> int:
    counts = {"fwd": 1, "bwd": 1, "fwd+bwd": 2}
    if direction not in counts:
        raise ValueError(f"rope_cases: pass must be one of {', '.join(counts)}, got {direction!r}; choose one")
    return counts[direction]


def _seed(name: str, seed: int) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())  # the same in every process, unlike hash()
