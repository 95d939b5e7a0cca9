"""Every invalid argument of the rotary functions for diffusers raises an error in the common form."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from compat_statement import check_named
from torch import Tensor

from fusewise.compat import diffusers

B, S, H, D = 2, 4, 3, 12


def rand(*shape: int) -> Tensor:
    return torch.rand(shape)


def both(*shape: int) -> tuple[Tensor, Tensor]:
    return rand(*shape), rand(*shape)


def axes() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(1, S, dtype=torch.int64) for _ in range(3))


X, XH, WIDE = rand(B, S, H, D), rand(B, H, S, D), rand(B, S, H * D)
FREQS = torch.complex(*both(9, D // 2))

# Valid calls.
CALLS: dict[Any, dict[str, Any]] = {
    diffusers.apply_rotary_emb_qwen_neuron: {"x": X, "freqs": rand(S, D // 2)},
    diffusers.apply_rotary_emb_wan: {"hidden_states": X, "freqs_cos": rand(1, S, 1, D), "freqs_sin": rand(1, S, 1, D)},
    diffusers.apply_rotary_emb_transposed: {"hidden_states": X, "freqs_cis": rand(B, S, 2 * D)},
    diffusers.apply_rotary_emb_anyflow: {"hidden_states": XH, "freqs": FREQS[None, None, :S]},
    diffusers.apply_rotary_emb_sana_wm: {"hidden_states": XH.mT, "freqs": FREQS[None, None, :S]},
    diffusers.apply_rotary_emb_joyimage: {"xq": X, "xk": X.clone(), "freqs_cis": both(S, D)},
    diffusers.apply_rotary_emb_batched: {"xq": X, "xk": X.clone(), "freqs_cis": both(B, S, D)},
    diffusers.apply_rotary_emb_minimax_h3: {"hidden_states": X, "cos": rand(S, 8), "sin": rand(S, 8)},
    diffusers.apply_partial_rotary_emb_minimax_music3: {"hidden_states": X, "rotary_emb": both(S, 8)},
    diffusers.apply_partial_rotary_emb: {"x": XH, "freqs_cis": both(S, 8)},
    diffusers.apply_rotary_partial: {"t": X, "freqs": rand(S + 1, 8)},
    diffusers.apply_rope_hidream: {"xq": X, "xk": X.clone(), "freqs_cis": rand(1, S, 1, D // 2, 2, 2)},
    diffusers.apply_rope_prx: {"xq": XH, "freqs_cis": rand(B, 1, S, D // 2, 2, 2)},
    diffusers.apply_rotary_kandinsky5: {"x": X, "rope": rand(S, 1, D // 2, 2, 2)},
    diffusers.apply_rotary_pos_emb_kolors: {"x": rand(S, B, H, D), "rope_cache": rand(S + 1, 1, 4, 2)},
    diffusers.rope_apply: {"x": X, "grid_sizes": torch.ones(B, 3, dtype=torch.int64), "freqs": FREQS, "time_stride": 1},
    diffusers.apply_rotary_emb_ltx: {"x": WIDE, "freqs": both(1, S, H * D)},
    diffusers.apply_interleaved_rotary_emb: {"x": WIDE, "freqs": both(B, S, H * D)},
    diffusers.apply_split_rotary_emb: {"x": WIDE, "freqs": both(B, H, S, D // 2)},
    diffusers.apply_rotary_emb_mochi: {"x": X, "freqs_cos": rand(S, H, D // 2), "freqs_sin": rand(S, H, D // 2)},
    diffusers.apply_rotary_emb_allegro: {
        "x": XH, "freqs_cis": (both(2, D // 3), both(3, D // 3), both(4, D // 3)), "positions": axes(),
    },
}  # fmt: skip


def within(value: Any, wrong: Any) -> list[Any]:
    """Replace each tensor in an argument, one at a time, by its invalid variants `wrong(tensor)`."""
    if isinstance(value, Tensor):
        return wrong(value)  # type: ignore[no-any-return]
    return [
        tuple(one if j == i else v for j, v in enumerate(value))
        for i, part in enumerate(value)
        for one in within(part, wrong)
    ]


PLACES = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function, arguments in CALLS.items()
    for name, value in arguments.items()
    if not isinstance(value, int)
]


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_are_right(function: Any) -> None:
    assert set(CALLS[function]) == set(inspect.signature(function).parameters)
    function(**CALLS[function])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("function", "name"), PLACES)
def test_what_is_no_strided_tensor_of_the_shape(function: Any, name: str) -> None:
    arguments = CALLS[function]
    value = arguments[name]
    for wrong in (
        lambda x: ["0", None, 1.5, [1.0], object()],
        lambda x: [x.flatten()[0].clone(), x.flatten(), x[None, None], x.to_sparse()],
        lambda x: [torch.nested.nested_tensor([x, x])],
        lambda x: [x[..., :-1], x.bool()],
    ):
        for one in within(value, wrong):
            check_named(function, arguments, **{name: one})
    if not isinstance(value, Tensor):
        for one in (None, 1, value[0], (*value, value[0])):
            check_named(function, arguments, **{name: one})


TABLES = "have shape (1 | B, S, 1, D) = (1 | 2, 4, 1, 12)"


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (diffusers.apply_rotary_emb_wan, {"hidden_states": WIDE}, "apply_rotary_emb_wan: hidden_states must have shape (B, S, H, D), got (2, 4, 36); "),
        (diffusers.apply_rotary_emb_wan, {"freqs_cos": rand(3, S, 1, D)}, f"apply_rotary_emb_wan: freqs_cos must {TABLES}, got (3, 4, 1, 12); "),
        (diffusers.apply_rotary_emb_wan, {"freqs_sin": rand(1, S + 1, 1, D)}, f"freqs_sin must {TABLES}, got (1, 5, 1, 12); "),
        (diffusers.apply_rotary_emb_wan, {"freqs_sin": rand(B, S, 1, D)}, "sin must have the shape of cos, (1, 4, 6), got (2, 4, 6); "),
        (diffusers.apply_rotary_emb_transposed, {"freqs_cis": rand(B, S, D)}, "have shape (1 | B, S, 2D) = (1 | 2, 4, 24), got (2, 4, 12); "),
        (diffusers.apply_rotary_emb_anyflow, {"freqs": rand(1, 1, S, D // 2)}, "freqs_cis must be complex, cos θ + i sin θ, got float32; "),
        (diffusers.apply_rotary_emb_joyimage, {"freqs_cis": rand(S, D)}, "freqs_cis must be (cos, sin), got Tensor; "),
        (diffusers.apply_rotary_emb_joyimage, {"xk": rand(B, S + 1, H, D)}, "xk must have shape (B, S, H, D) = (2, 4, any, 12), got (2, 5, 3, 12); "),
        (diffusers.apply_rotary_emb_minimax_h3, {"cos": rand(S, 14), "sin": rand(S, 14)}, "rotary_dim must be even and from 2 to head_dim = 12, got 14; "),
        (diffusers.apply_rotary_partial, {"freqs": rand(S - 1, 8)}, "apply_rotary_partial: freqs must have at least S = 4 rows, got 3; "),
        (diffusers.apply_rotary_pos_emb_kolors, {"rope_cache": rand(S - 1, 1, 4, 2)}, "rope_cache must have at least S = 4 rows, got 3; "),
        (diffusers.rope_apply, {"time_stride": 1.5}, "rope_apply: time_stride must be an int, got 1.5; "),
        (diffusers.rope_apply, {"time_stride": -1}, "rope_apply: time_stride must be from 0 to 2147483647, got -1; "),
        (diffusers.rope_apply, {"grid_sizes": rand(B, 3)}, "grid_sizes must have an integer dtype, got float32; "),
        (diffusers.apply_rotary_emb_ltx, {"x": rand(B, S, 35)}, "x must have an even number of features, at least 2, got 35; "),
        (diffusers.apply_rotary_emb_ltx, {"freqs": both(3, S, H * D)}, "cos must have shape (1 | B, S, C) = (1 | 2, 4, 36), got (3, 4, 36); "),
        (diffusers.apply_split_rotary_emb, {"freqs": both(B, 5, S, D // 2)}, "x must have an even number of features for each of 5 heads, got 36; "),
        (diffusers.apply_split_rotary_emb, {"freqs": both(B, H, S, D)}, "(1 | B, H, S, D / 2) = (1 | 2, 3, 4, 6), got (2, 3, 4, 12); "),
        (diffusers.apply_split_rotary_emb, {"x": rand(B, S, 1024), "freqs": both(B, S, 512)}, "have an even head_dim from 2 to 512, got 1024; "),
        (diffusers.apply_split_rotary_emb, {"freqs": both(B, S + 1, H * D // 2)}, "cos must have shape (1 | B, S, C / 2) = (1 | 2, 4, 18), got (2, 5, 18); "),
        (diffusers.apply_rotary_emb_mochi, {"freqs_cos": rand(S, 1, D // 2)}, "freqs_cos must have shape (S, H, D / 2) = (4, 3, 6), got (4, 1, 6); "),
        (diffusers.apply_rotary_emb_allegro, {"x": rand(B, H, S, 16)}, "x must have a head_dim of three even thirds, got 16; "),
        (diffusers.apply_rotary_emb_allegro, {"freqs_cis": (both(2, 4), tuple(t.half() for t in both(3, 4)), both(4, 4))}, "cos must have the dtype of the first table, float32, got float16; "),
        (diffusers.apply_rotary_emb_allegro, {"positions": axes()[:2]}, "positions must be three, of time, height and width, got tuple; "),
        (diffusers.apply_rotary_emb_allegro, {"positions": tuple(t.float() for t in axes())}, "positions must have dtype int32 or int64, got float32; "),
    ],
)  # fmt: skip
def test_messages(function: Any, wrong: dict[str, Any], message: str) -> None:
    assert message in check_named(function, CALLS[function], **wrong)
