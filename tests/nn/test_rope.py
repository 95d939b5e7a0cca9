"""RotaryEmbedding: what it passes to the op, and which arguments it refuses. Its tables (test_rope_tables.py) and
configurations (test_rope_config.py) are tested separately, with the helpers defined here.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fusewise.nn import RotaryEmbedding
from fusewise.ops.rope import rope, tables


def qk(tokens: int = 6, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, 4, head_dim)
    q = torch.randn(shape, generator=generator).to(dtype)
    return q, torch.randn(shape, generator=generator).to(dtype)[:, :, :2]


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    """Half pairing over the leading features, written out in float64."""
    angles = positions.double()[..., None, None] * frequencies.double()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    pairs = len(frequencies)
    a, b, rest = x.double().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Two products with a float32-rounded cos or sin below 1, and a sum: four half ulps of the largest value.
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4 * 2.0**-24 * expected.abs().max().item())


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotates_q_and_k(table: Any, rotary_dim: int | None, offset: int) -> None:
    module = RotaryEmbedding(16, rotary_dim=rotary_dim, base=500.0, table=table, max_positions=8)
    frequencies, _ = tables.default(rotary_dim=rotary_dim or 16, base=500.0)
    q, k = qk()
    positions = torch.arange(offset, offset + 6)
    for y, x in zip(module(q, k, offset=offset), (q, k), strict=True):
        near(y, rotated(x, positions, frequencies))
    near(module(q, offset=offset), rotated(q, positions, frequencies))


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_position_ids_and_scaling(table: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    module = RotaryEmbedding(16, table=table, max_positions=200, **yarn)
    frequencies, scaling = tables.yarn(rotary_dim=16, factor=4.0, original_max_position_embeddings=64)
    assert module.scaling == scaling > 1
    q, k = qk()
    positions = torch.tensor([[0, 199, 3, 3, 80, 7], [11, 5, 5, 5, 100, 0]])
    for y, x in zip(module(q, k, positions), (q, k), strict=True):
        near(y, rotated(x, positions, frequencies, scaling))


def test_options_reach_the_op() -> None:
    module = RotaryEmbedding(16, rotary_dim=8, rotary_start=-8, pairing="interleaved_to_half", layout="bhsd")
    q, k = (x.transpose(1, 2) for x in qk())
    expected = rope(
        q, k, inv_freq=module.inv_freq, rotary_dim=8, rotary_start=-8, pairing="interleaved_to_half", layout="bhsd"
    )
    assert all(torch.equal(a, b) for a, b in zip(module(q, k), expected, strict=True))
    back = RotaryEmbedding(16, rotary_dim=8, layout="bhsd")
    torch.testing.assert_close(back(back(q), inverse=True), q)
    packed = RotaryEmbedding(16, layout="thd")
    tokens = qk()[0].flatten(0, 1)
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    near(packed(tokens, cu_seqlens=bounds), rotated(tokens, torch.arange(12) % 6, packed.inv_freq))


def test_gradients_flow() -> None:
    module = RotaryEmbedding(16)
    q = qk()[0].requires_grad_()
    upstream = torch.randn_like(q)
    module(q).backward(upstream)
    assert q.grad is not None
    torch.testing.assert_close(q.grad, module(upstream, inverse=True))


def test_context_parallel_ranks_agree_with_the_whole_sequence() -> None:
    q = qk(8)[0]
    for table in ("inv_freq", "cos_sin"):
        whole = RotaryEmbedding(16, table=table)(q)
        module = RotaryEmbedding(16, table=table, max_positions=1)
        for rank, chunks in enumerate(([0, 3], [1, 2])):
            local = torch.cat([q[:, 2 * c : 2 * c + 2] for c in chunks], dim=1)
            expected = torch.cat([whole[:, 2 * c : 2 * c + 2] for c in chunks], dim=1)
            torch.testing.assert_close(module(local, context_parallel=(rank, 2)), expected, rtol=0, atol=1e-6)


def test_repr_says_what_it_is() -> None:
    assert repr(RotaryEmbedding(128, base=500000.0)) == (
        "RotaryEmbedding(128, base=500000, rope_type='default', pairing='half', layout='bshd', table='inv_freq')"
    )
    assert "rotary_dim=64, rotary_start=-64" in repr(RotaryEmbedding(192, rotary_dim=64, rotary_start=-64))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"impl": "nosuch"}, ValueError, "impl must be one of auto, triton"),
        ({"rotary_start": 8}, ValueError, "rotary_start must leave room for rotary_dim = 16"),
        ({"rotary_start": 1.5}, TypeError, "rotary_start must be an int"),
        ({"sections": (1, 2)}, ValueError, "sections must be three numbers of pairs"),
        ({"sections_interleaved": "x"}, TypeError, "sections_interleaved must be a bool"),
        ({"head_dim": 514}, ValueError, "an even head_dim from 2 to 512"),
    ],
    ids=str,
)
def test_options_are_refused_at_construction(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^RotaryEmbedding: .*{words}"):
        RotaryEmbedding(**{"head_dim": 16, **options})


def nested() -> torch.Tensor:
    """Different numbers of heads, so it has no sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2, 3, 16), torch.ones(1, 3, 16)])


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
@pytest.mark.parametrize("q", [[1], torch.ones(16), nested()], ids=["list", "one dimension", "nested"])
def test_what_is_wrong_with_q_is_told_as_by_the_function(q: Any, table: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^rope: q must"):
        RotaryEmbedding(16, table=table)(q)


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_heads_of_another_width_are_refused_where_the_whole_head_rotates(table: Any) -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(
        ValueError, match=r"^RotaryEmbedding: q must have heads of head_dim = 8 features, got 16; .*rotary_dim=8"
    ):
        RotaryEmbedding(8, table=table)(q)
    y = RotaryEmbedding(8, table=table, rotary_dim=8)(q)
    assert torch.equal(y[..., 8:], q[..., 8:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "angles"}, r"RotaryEmbedding: table must be one of inv_freq, cos_sin, got 'angles'; "),
        ({"max_positions": 0}, r"RotaryEmbedding: max_positions must be at least 1, got 0; "),
        ({"rotary_dim": 32}, r"RotaryEmbedding: rotary_dim must be even and from 2 to head_dim = 16, got 32; "),
        ({"rotary_dim": 7}, r"rope_tables: rotary_dim must be even, got 7; "),
        ({"layout": "x"}, r"RotaryEmbedding: layout must be one of bshd, .*, got 'x'; "),
        ({"pairing": "x"}, r"RotaryEmbedding: pairing must be one of half, .*, got 'x'; "),
        ({"rope_type": "ntk"}, r"rope_tables: rope_type must be one of .*, got 'ntk'; "),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        RotaryEmbedding(16, **arguments)


@pytest.mark.parametrize("name", ["head_dim", "rotary_dim", "max_positions"])
def test_arguments_of_another_type_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^RotaryEmbedding: {name} must be an int, got '8'; convert it$"):
        RotaryEmbedding(**{"head_dim": 16, name: "8"})
    with pytest.raises(TypeError, match=r"^RotaryEmbedding: length must be an int, got '8'; convert it$"):
        RotaryEmbedding(16, table="cos_sin").reserve("8")


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_integers_of_numpy_are_taken(table: Any) -> None:
    made = [
        RotaryEmbedding(kind(16), rotary_dim=kind(8), rotary_start=kind(-8), table=table, max_positions=kind(4))
        for kind in (int, np.int64)
    ]
    q = torch.randn(1, 6, 2, 16)
    expected = made[0](q, offset=3)
    assert torch.equal(made[1](q, offset=np.int64(3)), expected)
    assert all(type(x) is not np.int64 for x in (*vars(made[1]).values(), *made[1].options.values()))
    parallel = [
        module(q, context_parallel=(kind(3), kind(4))) for module, kind in zip(made, (int, np.int64), strict=True)
    ]
    assert torch.equal(*parallel)


def test_a_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^rope_tables: parameters of rope_type 'default' must be among .*, got 'factor'; "
    ):
        RotaryEmbedding(16, factor=2.0)
