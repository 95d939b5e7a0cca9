"""nn.QKNormRope equals the function called with the module's weights, table and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewise
from fusewise.nn import QKNormRope, RotaryEmbedding


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
@pytest.mark.parametrize(
    "options", [{}, {"weight_offset": 1.0, "eps": 1e-5}, {"norm": "all", "heads": (4, 2)}], ids=["qwen3", "gemma3", "olmo2"]
)  # fmt: skip
def test_it_is_the_function(table: Any, options: dict[str, Any]) -> None:
    rotary = RotaryEmbedding(16, table=table, max_positions=8, base=500.0, layout="bhsd", rotary_dim=8)
    module = QKNormRope(rotary, **options)
    q, k = torch.randn(2, 4, 11, 16), torch.randn(2, 2, 11, 16)
    call = {name: value for name, value in options.items() if name != "heads"}

    def function(**where: Any) -> Any:
        rotation = {"inv_freq": rotary.inv_freq, "layout": "bhsd", "rotary_dim": 8, **where}
        return fusewise.qk_norm_rope(q, k, module.q_weight, module.k_weight, **call, **rotation)

    for y in module(q, k):  # with the initial weights, lengths are sqrt(head_dim)
        whole = y.transpose(1, 2).flatten(-2) if options.get("norm") == "all" else y
        torch.testing.assert_close(whole.square().mean(-1), torch.ones(whole.shape[:-1]), rtol=1e-4, atol=1e-4)
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    where: tuple[dict[str, Any], ...] = ({}, {"offset": 20}, {"positions": torch.arange(11).flip(0)})
    for arguments in where:
        for a, b in zip(module(q, k, **arguments), function(**arguments), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_parameters() -> None:
    rotary = RotaryEmbedding(16)
    module = QKNormRope(rotary, norm="all", heads=(4, 2), weight_offset=1.0, dtype=torch.bfloat16)
    assert {n: (tuple(p.shape), p.dtype) for n, p in module.named_parameters()} == {
        "q_weight": ((64,), torch.bfloat16),
        "k_weight": ((32,), torch.bfloat16),
    }
    assert set(module.state_dict()) == {"q_weight", "k_weight"}
    assert all((p == 0).all() for p in module.parameters())
    q, k = module(torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16))
    (q.sum() + k.square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "token"}, "norm must be one of head, all, got 'token'"),
        ({"norm": "all"}, r'heads must be \(heads of q, heads of k\) for norm="all", got None'),
        ({"heads": (4, 2)}, r'heads must be None for norm="head", got \(4, 2\)'),
        ({"norm": "all", "heads": 4}, r"heads must be \(heads of q, heads of k\) .*, got 4"),
        ({"norm": "all", "heads": (4, 2, 1)}, r"heads must be \(heads of q, heads of k\) .*, got \(4, 2, 1\)"),
        ({"norm": "all", "heads": (4, 0)}, "heads must be at least 1, got 0"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^QKNormRope: {words}; "):
        QKNormRope(RotaryEmbedding(16), **options)


@pytest.mark.parametrize("option", ["eps", "weight_offset"])
def test_a_number_that_is_none(option: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^QKNormRope: {option} must be a float or an int, finite in float32, got None; "
    ):
        QKNormRope(RotaryEmbedding(16), **{option: None})


def test_weights_of_any_memory_and_made_without() -> None:
    with torch.device("meta"):
        module = QKNormRope(RotaryEmbedding(16), weight_offset=1.0)
    module.to_empty(device="cpu").reset_parameters()
    assert all(torch.equal(weight, torch.zeros(16)) for weight in module.parameters())
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 1, 16)
    expected = module(q, k)
    module.q_weight, module.k_weight = (torch.nn.Parameter(torch.zeros(16, 2)[:, 0]) for _ in range(2))
    for a, b in zip(module(q, k), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"QKNormRope: eps must be at least 0, got -1\.0"):
        QKNormRope(RotaryEmbedding(16), eps=-1.0)
    with pytest.raises(ValueError, match=r"q_weight must be contiguous, .*; call q_weight.contiguous\(\)"):
        fusewise.qk_norm_rope(q, None, torch.ones(32)[::2], inv_freq=module.rotary.inv_freq)


def test_a_module_with_heads_is_not_yet_a_rotary_embedding() -> None:
    with pytest.raises(TypeError, match="QKNormRope: rotary must be a RotaryEmbedding, got MultiheadAttention"):
        QKNormRope(torch.nn.MultiheadAttention(64, 1))  # type: ignore[arg-type]
