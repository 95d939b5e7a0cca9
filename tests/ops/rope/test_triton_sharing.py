"""Triton's threads that rotate several heads with the same cos and sin give the bits of those that rotate one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewise

from .support import Place, assert_bits, places, require

triton = pytest.importorskip("triton")
from fusewise._shared.memo import Memo  # noqa: E402
from fusewise.ops.rope import _triton  # noqa: E402

triton_places = pytest.mark.parametrize("place", [p for p in places() if p.values[0].impl == "triton"])

# q and k heads with the blocks and steps that rotate them, by 8 lanes of 16 bytes per head
HEADS = {
    (32, 8): [(1, 16, 2), (4, 4, 2)],
    (24, 3): [(2, 8, 3), (4, 4, 1)],  # three heads have a padding one, so that their blocks are not full
    (20, 1): [(8, 2, 2), (16, 1, 1)],
}
CALLS: dict[str, dict[str, Any]] = {
    "half": {},
    "inverse": {"inverse": True, "scale": 0.5},
    "interleaved": {"pairing": "interleaved"},
    "to half": {"pairing": "interleaved_to_half"},
    "bhsd": {"layout": "bhsd"},
    # The last token belongs to no sequence.
    "packed": {"layout": "thd", "cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)},
}


@triton_places
@pytest.mark.parametrize(
    ("name", "heads"), [*((name, (32, 8)) for name in CALLS), ("half", (24, 3)), ("half", (20, 1))], ids=str
)
def test_heads_that_share_angles(
    name: str, heads: tuple[int, int], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(place)
    if place.device == "cpu":
        monkeypatch.setattr(_triton, "processors_of", lambda device: 1)  # larger tiles, fewer programs to interpret
    call = {key: v.to(place.device) if isinstance(v, torch.Tensor) else v for key, v in CALLS[name].items()}
    packed, across = "cu_seqlens" in call, call.get("layout") == "bhsd"

    def random(count: int) -> torch.Tensor:
        x = torch.randn(1 if packed else 2, 5, count, 80).half().to(place.device)
        return x[0] if packed else x.transpose(1, 2).contiguous() if across else x

    q, k = map(random, heads)
    inv_freq = (10000.0 ** -(torch.arange(40) / 40)).to(place.device)
    ys = {}
    for programs in (10**9, 0):
        monkeypatch.setattr(_triton, "PROGRAMS", programs)
        monkeypatch.setattr(_triton, "_PLANS", Memo(8))  # chosen with the other number
        ys[programs] = fusewise.rope(q, k, inv_freq=inv_freq, impl="triton", **call)
        xs = q.clone(), k.clone()
        fusewise.rope_(*xs, inv_freq=inv_freq, impl="triton", **call)
        for x, y in zip(xs, ys[programs], strict=True):
            assert_bits(x, y)
    for alone, shared in zip(*ys.values(), strict=True):
        assert_bits(shared, alone)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_which_heads_share(heads: tuple[int, int]) -> None:
    tiles = _triton.choose_sharing_tiles(2**15, heads, 8, 132)
    assert [(tile.block_t, tile.block_h, tile.steps) for tile in tiles] == HEADS[heads]


def test_few_tokens_do_not_share() -> None:
    """A decode step has too few programs as it is."""
    assert _triton.choose_sharing_tiles(1024, (32, 8), 8, 132) == _triton.choose_tiles(1024, (32, 8), 8, 132)
