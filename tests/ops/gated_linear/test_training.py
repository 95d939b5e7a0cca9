"""A byte-level language model, trained on the Python standard library's source, learns as well with fused operations as with eager.

Two runs that differ only in rounding diverge during training. The tolerance is measured: a third run is eager with permuted
hidden features of its MLPs, the same mathematics in another summation order. The fused run must stay within a small
multiple of that distance.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fusewise
from fusewise.nn import GatedMLP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, BATCH, WIDTH, HEADS, LAYERS, STEPS = 64, 8, 64, 4, 2, 300


def corpus() -> Tensor:
    """The largest modules of the standard library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:20]
    return torch.tensor(list(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, fused: bool, save: Any) -> None:
        super().__init__()
        self.fused = fused
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = GatedMLP(WIDTH, 3 * WIDTH, bias=True, activation="gelu_tanh", save=save)

    def forward(self, x: Tensor, inv_freq: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = fusewise.rope(q, k, inv_freq=inv_freq) if self.fused else self.rotate(q, k, inv_freq)
        heads = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        if self.fused:
            return x + self.mlp(h)
        y = functional.gelu(self.mlp.gate_proj(h), approximate="tanh") * self.mlp.up_proj(h)
        out: Tensor = x + self.mlp.down_proj(y)
        return out

    @staticmethod
    def rotate(q: Tensor, k: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(q.shape[1], device=q.device)[:, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return turn(q), turn(k)


class Model(nn.Module):
    inv_freq: Tensor

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            Block(fused, save) for _, save in zip(range(LAYERS), ("preact", "input"), strict=True)
        )
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("inv_freq", 10000.0 ** -torch.arange(0, 1, 2 * HEADS / WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.inv_freq)
        out: Tensor = self.head(self.norm(x))
        return out


def reordered(model: Model) -> Model:
    """The same function with permuted hidden features of its MLPs."""
    model = copy.deepcopy(model)
    order = torch.randperm(3 * WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for block in model.blocks:
            for linear in (block.mlp.gate_proj, block.mlp.up_proj):
                linear.weight.copy_(linear.weight[order])
                linear.bias.copy_(linear.bias[order])
            block.mlp.down_proj.weight.copy_(block.mlp.down_proj.weight[:, order])
    return model


def losses(model: Model, text: Tensor) -> Tensor:
    """Train one model; return the loss of every step."""
    model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(2)
    curve = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = text[starts + torch.arange(CONTEXT + 1)].long().to(DEVICE)
        loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).double().cpu()


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads would only add synchronization."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_a_language_model_learns_as_with_eager() -> None:
    text = corpus()
    eager = losses(Model(fused=False), text)
    other = losses(reordered(Model(fused=False)), text)
    fused = losses(Model(fused=True), text)

    assert float(eager[0]) > 5 and float(eager[-20:].mean()) < 2.7  # from about ln 256 = 5.5 to something learned
    torch.testing.assert_close(fused[0], eager[0], rtol=1e-5, atol=0)

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b).square().mean().sqrt())

    found, expected = distance(fused, eager), distance(other, eager)
    assert 0 < expected < 1e-3, "the band is one of rounding"
    assert found <= 4 * expected, (found, expected)
