"""Named cases of the gated linear unit, shared by tests, benchmarks, the study and the reports.

    cases("geglu-models")  -> list of GatedCase        case("llama-3-8b-train") -> GatedCase
    inputs = c.make_inputs("cuda", "bf16", seed=0)     gated_linear(*inputs.operands, **inputs.kwargs)

Presets: `geglu-memory` (rows N from 1k to 64k by width d from 1k to 8k, hidden 4d: where fusing saves memory),
`geglu-models` (the feed-forward blocks of published models in training and decode), `geglu-batches` (some of them with
160 to 512 rows), `geglu-shapes` (one shape, and variants with a size that tiles do not divide or rows not 16-byte
aligned), `geglu-quick` (minutes on a laptop). Shape legend: M rows of x, D features in, F features out of the gated
unit, O behind a down projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._cases import PRECISIONS, Pass, by_pass, of_name, of_preset, seed_of
from ._autograd import LARGE_BYTES
from ._chunks import chunk_bytes, rows_of, scratch_bytes
from ._problem import Activation

#: Memory model of a provider; see `GatedCase.predicted_bytes`.
Form = Literal[
    "eager", "two-kernels", "fused", "fused-recompute", "chunked", "chunked-recompute", "chunked-apart", "chunked-apart-recompute",
    "chunked-apart-dw", "chunked-apart-dw-recompute",
    "unfused", "unfused-recompute", "fused-training",
]  # fmt: skip


@dataclass(frozen=True)
class GatedInputs:
    """The tensors of one case: operands, an upstream gradient, and the keyword arguments of the call."""

    operands: tuple[Tensor, ...]  # x, weight (2F, D), then bias (2F,) if the case has one
    gradients: tuple[Tensor, ...]  # dy (M, F)
    kwargs: dict[str, Any]  # keyword arguments of `gated_linear`
    w_down: Tensor | None  # (O, F), for an MLP


@dataclass(frozen=True, kw_only=True)
class GatedCase:
    """One named case. All counts follow from the mathematics, none from an implementation."""

    name: str
    rows: int  # M
    features: int  # D
    hidden: int  # F
    activation: Activation = "gelu_tanh"
    bias: bool = False
    gate_first: bool = False
    out: int = 0  # O, features behind the down projection of the model's MLP; 0: it has none
    dtypes: tuple[str, ...] = ("bf16",)
    passes: tuple[Pass, ...] = ("fwd", "fwd+bwd")
    regime: Literal["train", "prefill", "decode", "sweep"] = "sweep"
    model: str = ""  # the published configuration it comes from; "": synthetic

    @property
    def shape(self) -> str:
        """The shape in words, as records and reports show it."""
        words = [f"x[{self.rows},{self.features}]", f"w[{2 * self.hidden},{self.features}]", self.activation]
        return " ".join(words + ["bias"] * self.bias + ["gate first"] * self.gate_first)

    @property
    def weight_elements(self) -> int:
        """Elements of the weight and the bias."""
        return 2 * self.hidden * (self.features + self.bias)

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Minimum DRAM traffic: forward reads x, weight and bias and writes y; backward reads those and dy and writes
        their gradients. Saved and intermediate tensors are an implementation's choice."""
        read = self.rows * self.features + self.weight_elements
        y = self.rows * self.hidden
        return by_pass("gated_cases", direction, read + y, 2 * read + y) * PRECISIONS[dtype].itemsize

    def flops_min(self, direction: Pass) -> int:
        """Multiplications and additions of the products: one forward, two backward (dx and dW)."""
        product = 4 * self.rows * self.hidden * self.features
        return by_pass("gated_cases", direction, product, 2 * product)

    def output_bytes(self, dtype: str) -> int:
        """y: what an inference must allocate."""
        return self.rows * self.hidden * PRECISIONS[dtype].itemsize

    def gradient_bytes(self, dtype: str) -> int:
        """dx, dW and db: what a backward must allocate."""
        return (self.rows * self.features + self.weight_elements) * PRECISIONS[dtype].itemsize

    def predicted_bytes(self, direction: Pass, dtype: str, form: Form) -> int:
        """Peak bytes besides the inputs and dy, by the memory model of each form.

        With h = M·F elements and y (h) alive throughout: "eager" allocates 2h for the product, h for the activated gate
        and h for y, and its backward another 2h. "two-kernels" is a product and a fused gate (torch.compile): 2h and y,
        and a gradient of another 2h. "fused" allocates only y; with gradients it saves 2h, and their gradient
        overwrites them. "fused-recompute" saves only y and recomputes the 2h in the backward, h at a time if they are
        large. dx, dW and db come last, while that gradient is freed. "chunked" and "chunked-recompute" are the same on
        a CPU, where an inference forward also needs a chunk of the gate's pre-activations; "chunked-apart" and
        "chunked-apart-recompute" are with oneDNN, which needs a chunk of both, "chunked-apart-dw" and
        "chunked-apart-dw-recompute" if it computes dW, too, for which it needs more memory (`apart_bytes`).
        "unfused" and "unfused-recompute" are float32 products on a GPU, by the library, followed by the gate: 2h and y.
        "fused-training" is the forward alone of "fused" with gradients, of which the 2h are left.
        """
        itemsize = PRECISIONS[dtype].itemsize
        h = self.rows * self.hidden * itemsize
        chunk = 0
        if form.startswith("chunked"):
            chunk = scratch_bytes(self.rows, self.hidden, itemsize, apart="apart" in form)
        recompute = form.endswith("recompute")
        forward = {
            "eager": 4 * h,
            "two-kernels": 3 * h,
            "unfused": 3 * h,
            "unfused-recompute": 3 * h,
            "fused-training": 3 * h,
        }.get(form, h + chunk)
        if direction == "fwd":
            return forward
        large = 2 * h >= LARGE_BYTES
        kept = h if recompute and large else 2 * h
        backward = {"eager": 6 * h, "two-kernels": 5 * h}.get(form, h + kept)
        last = h + kept + self.gradient_bytes(dtype) + (self.apart_bytes(dtype) if "dw" in form else 0)
        apart = form in ("chunked", "chunked-apart", "chunked-apart-dw") or (form == "fused" and itemsize == 2)
        if apart and large and self.rows >= self.features:
            half = self.weight_elements * itemsize // 2
            dx = self.rows * self.features * itemsize
            last = max(3 * h + dx + half, 2 * h + dx + 3 * half)
        return max(forward if recompute else backward, backward, last)

    def apart_bytes(self, dtype: str) -> int:
        """Additional memory of oneDNN for dW: the rows that it copies, and a second dW if these are not all rows."""
        itemsize = PRECISIONS[dtype].itemsize
        row_bytes = 2 * self.hidden * itemsize
        again = self.weight_elements * itemsize if self.rows > rows_of(row_bytes) else 0
        return chunk_bytes(self.rows, row_bytes) + again

    @property
    def saved_ratio(self) -> float:
        """Activation memory saved by fusing, relative to the parameters: 4·N·d / (8·d·d + 8·d) = N / (2 (d + 1)) for
        hidden 4d with a bias. Above one, fusing saves more than the weights take."""
        return self.rows * self.hidden / (2 * self.hidden * (self.features + self.bias))

    def make_inputs(self, device: torch.device | str, dtype: str, seed: int = 0) -> GatedInputs:
        """The case's tensors: standard normal x, bias and gradient, weights with standard deviation 1 / √D, so that
        gates have unit variance.

        Generated on `device` itself by a generator seeded from `seed` and the case's name: reproducible across
        processes for one kind of device and torch version.
        """
        generator = torch.Generator(device).manual_seed(seed_of(self.name, seed))

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=PRECISIONS[dtype]).mul_(scale)

        x = normal(self.rows, self.features)
        weight = normal(2 * self.hidden, self.features, scale=1 / math.sqrt(self.features))
        operands = (x, weight, normal(2 * self.hidden)) if self.bias else (x, weight)
        dy = normal(self.rows, self.hidden)
        w_down = normal(self.out, self.hidden, scale=1 / math.sqrt(self.hidden)) if self.out else None
        return GatedInputs(operands, (dy,), {"activation": self.activation, "gate_first": self.gate_first}, w_down)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The fields of a published configuration that decide its feed-forward block."""

    checkpoint: str
    features: int
    hidden: int
    activation: Activation
    bias: bool = False
    gate_first: bool = True
    dtype: str = "bf16"
    train_rows: int = 16384  # tokens a device and step
    decodes: bool = True


# Values: hidden_size, intermediate_size and hidden_act of the checkpoint's config.json; of the image models, the width
# of a transformer block, whose GEGLU has 4 times and whose SwiGLU 3 times as many hidden features.
_MODELS = {
    "gemma-2b": _Model(checkpoint="google/gemma-2b", features=2048, hidden=16384, activation="gelu_tanh"),
    "gemma-7b": _Model(checkpoint="google/gemma-7b", features=3072, hidden=24576, activation="gelu_tanh"),
    "gemma-2-9b": _Model(checkpoint="google/gemma-2-9b", features=3584, hidden=14336, activation="gelu_tanh"),
    "llama-3-8b": _Model(checkpoint="meta-llama/Meta-Llama-3-8B", features=4096, hidden=14336, activation="silu"),
    "llama-3-70b": _Model(checkpoint="meta-llama/Meta-Llama-3-70B", features=8192, hidden=28672, activation="silu"),
    "mistral-7b": _Model(checkpoint="mistralai/Mistral-7B-v0.3", features=4096, hidden=14336, activation="silu"),
    "phi-3-mini": _Model(checkpoint="microsoft/Phi-3-mini-4k-instruct", features=3072, hidden=8192, activation="silu"),
    # 1024 x 1024 pixels: 4096 and 1024 tokens an image at the two block widths; diffusers' GEGLU: value first, erf, bias
    "sdxl-640": _Model(
        checkpoint="stabilityai/stable-diffusion-xl-base-1.0", features=640, hidden=2560, activation="gelu", bias=True,
        gate_first=False, dtype="fp16", train_rows=8192, decodes=False,
    ),
    "sdxl-1280": _Model(
        checkpoint="stabilityai/stable-diffusion-xl-base-1.0", features=1280, hidden=5120, activation="gelu", bias=True,
        gate_first=False, dtype="fp16", train_rows=2048, decodes=False,
    ),
    "flux2-klein-4b": _Model(
        checkpoint="black-forest-labs/FLUX.2-klein-4B", features=3072, hidden=9216, activation="silu",
        train_rows=4608, decodes=False,
    ),
}  # fmt: skip


def _model_case(name: str, suffix: str, rows: int, regime: Literal["train", "decode"]) -> GatedCase:
    model = _MODELS[name]
    return GatedCase(
        name=f"{name}-{suffix}",
        model=model.checkpoint,
        regime=regime,
        rows=rows,
        features=model.features,
        hidden=model.hidden,
        activation=model.activation,
        bias=model.bias,
        gate_first=model.gate_first,
        out=model.features,
        dtypes=(model.dtype,),
        passes=("fwd", "fwd+bwd") if regime == "train" else ("fwd",),
    )


def _models() -> list[GatedCase]:
    found = []
    for name, model in _MODELS.items():
        found.append(_model_case(name, "train", model.train_rows, "train"))
        if model.decodes:
            found += [_model_case(name, f"decode-b{rows}", rows, "decode") for rows in (1, 16, 64, 128)]
    return found


def _batches() -> list[GatedCase]:
    """Between decode and training: large batches, and chunks of a prefill."""
    names = ("gemma-2b", "llama-3-8b", "llama-3-70b", "phi-3-mini")
    return [
        _model_case(name, f"batch-{rows}", rows, "decode")
        for name in names
        for rows in (160, 200, 256, 272, 320, 400, 512)
    ]


def _memory(rows: int, features: int) -> GatedCase:
    return GatedCase(
        name=f"memory-n{rows}-d{features}",
        rows=rows,
        features=features,
        hidden=4 * features,
        bias=True,
        dtypes=("bf16",),
    )


def _shapes() -> list[GatedCase]:
    def shape(name: str, rows: int = 8192, features: int = 2048, hidden: int = 8192, **rest: Any) -> GatedCase:
        return GatedCase(name=f"shapes-{name}", rows=rows, features=features, hidden=hidden, **rest)

    return [
        shape("aligned", dtypes=("bf16", "fp32")),
        shape("rows-8191", rows=8191),
        shape("features-2052", features=2052),  # rows of x and weight aligned to 8 bytes
        shape("features-2049", features=2049),  # and to 2
        shape("hidden-8191", hidden=8191),  # rows of y aligned to 2 bytes
        shape("hidden-8200", hidden=8200),  # aligned, but not a multiple of a tile
    ]


def _quick() -> list[GatedCase]:
    def quick(name: str, rows: int, features: int, hidden: int, **rest: Any) -> GatedCase:
        return GatedCase(name=f"quick-{name}", rows=rows, features=features, hidden=hidden, **rest)

    return [
        quick("square", 1024, 512, 2048, bias=True, dtypes=("fp32", "bf16")),
        quick("wide", 512, 1024, 4096, bias=True, dtypes=("fp32",)),
        quick("swiglu", 512, 768, 2048, activation="silu", gate_first=True, dtypes=("fp32",)),
        quick("diffusers", 1024, 320, 1280, activation="gelu", bias=True, dtypes=("fp32",)),
        quick("decode", 16, 1024, 4096, activation="silu", dtypes=("fp32", "bf16"), passes=("fwd",), regime="decode"),
    ]


PRESETS: dict[str, list[GatedCase]] = {
    "geglu-memory": [
        _memory(n, d) for d in (1024, 2048, 4096, 8192) for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    ],
    "geglu-models": _models(),
    "geglu-batches": _batches(),
    "geglu-shapes": _shapes(),
    "geglu-quick": _quick(),
}


def cases(preset: str) -> list[GatedCase]:
    """The cases of a preset, in the order of its table."""
    return of_preset("gated_cases", PRESETS, preset)


def case(name: str) -> GatedCase:
    """The case of that name, from whichever preset has it."""
    return of_name("gated_cases", PRESETS, name)
