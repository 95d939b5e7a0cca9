"""Dispatch of GPU calls, as far as it can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise.ops.qk_norm_rope import _op, api

from ..a_gpu import as_dispatch_sees_it

BF16 = torch.bfloat16


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    _op._unready.cache_clear()
    yield from as_dispatch_sees_it(_op.choice, monkeypatch)
    _op._unready.cache_clear()


CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    # the arguments, and whether large calls take CUDA
    "a model's": ({}, True),
    "interleaved": ({"pairing": "interleaved"}, True),
    "weights in float32": ({"weight_dtype": torch.float32}, True),
    "no weights": ({"weight_dtype": None}, True),
    "all heads": ({"norm": "all"}, True),
    "positions": ({"positions": (8192,)}, True),
    "weights in float16": ({"weight_dtype": torch.float16}, False),
    "reordered": ({"pairing": "interleaved_to_half"}, False),
    "the first part of the head": ({"rotary_dim": 32}, True),
    "the last part of the head": ({"rotary_dim": 32, "rotary_start": 32}, False),
    "an odd part of the head": ({"rotary_dim": 24}, False),
    "an offset for each": ({"offset": (1,)}, False),
    "context parallel": ({"context_parallel": (0, 2)}, False),
    "sections": ({"positions": (3, 8192), "sections": (16, 8, 8)}, False),
}


def arguments(tokens: int, weight_dtype: torch.dtype | None = BF16, **options: Any) -> dict[str, Any]:
    """Arguments of a call with tokens of 8 and 2 heads of 64; tensors are given by their shapes."""
    width = options.get("rotary_dim", 64) // 2
    all_heads = options.get("norm") == "all"
    tensors: dict[str, Any] = {}
    for name, heads in (("q", 8), ("k", 2)):
        tensors[name] = torch.empty(1, tokens, heads, 64, dtype=BF16, device="cuda")
        count = 64 * (heads if all_heads else 1)
        tensors[f"{name}_weight"] = (
            None if weight_dtype is None else torch.empty(count, dtype=weight_dtype, device="cuda")
        )
    for name, value in options.items():
        if name in ("positions", "offset"):
            shape = [tokens if size == 8192 else size for size in value]
            options[name] = torch.empty(shape, dtype=torch.int64, device="cuda")
    cos, sin = (torch.empty(9000, width, device="cuda") for _ in range(2))
    return {**tensors, "cos": cos, "sin": sin, **options}


def served(call: dict[str, Any]) -> str:
    """What the operator of a call takes."""
    own = (call.pop(name) for name in ("q", "k", "q_weight", "k_weight"))
    norm = (call.pop("eps", 1e-6), call.pop("weight_offset", 0.0), call.pop("norm", "head"))
    defaults = dict.fromkeys(
        ("cos", "sin", "cos_sin", "angles", "inv_freq", "positions", "offset", "cu_seqlens", "sections",
         "sections_interleaved", "context_parallel", "layout", "pairing", "rotary_dim", "rotary_start", "scale", "inverse")
    ) | {"offset": 0, "sections_interleaved": False, "layout": "bshd", "pairing": "half", "rotary_start": 0, "scale": 1.0, "inverse": False}  # fmt: skip
    q, k, q_weight, k_weight = own
    validated, _ = api.validated(q, k, q_weight, k_weight, tuple((defaults | call).values()), "bshd", norm, "auto")
    rotation, _, impl = _op._split(validated)
    return str(_op.serving(impl, *_op.lists(q, k, q_weight, k_weight), rotation))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("tokens", "large"), [(408, False), (412, True)])  # on both sides of 1 MiB
def test_auto_takes_cuda_where_it_has_a_kernel_for_the_call(
    name: str, tokens: int, large: bool, a_gpu: list[str]
) -> None:
    a_gpu.clear()
    given, always = CALLS[name]
    taken = "cuda" if always or not large else "triton"
    with FakeTensorMode():
        call = arguments(tokens, **given)
        told = fusewise.explain_dispatch(fusewise.qk_norm_rope, **call)
        assert told.impl == taken
        assert ("beyond 1 MiB is faster in Triton" in told.passed_over.get("cuda", "")) == (taken == "triton")
        assert served(call) == taken


@pytest.mark.parametrize(
    ("built", "table", "reason"), [(False, "cos", "not built"), (True, "angles", "for tables of cos and sin")]
)
def test_why_auto_does_not_take_cuda(built: bool, table: str, reason: str, a_gpu: list[str]) -> None:
    a_gpu[:] = [] if built else a_gpu
    with FakeTensorMode():
        call = arguments(1)
        if table == "angles":
            del call["sin"]
            call["angles"] = call.pop("cos")
        told = fusewise.explain_dispatch(fusewise.qk_norm_rope, **call)
        assert (told.impl, reason in told.passed_over["cuda"]) == ("triton", True)
        assert served(call) == "triton"


def test_the_choice_stays_in_a_process(a_gpu: list[str]) -> None:
    """CUDA's sums have another order than Triton's: results do not change when a later call builds its library."""
    with FakeTensorMode():
        call = arguments(1)
        assert fusewise.explain_dispatch(fusewise.qk_norm_rope, **call).impl == "triton"
        a_gpu.clear()
        _op.choice.unready.cache_clear()
        assert fusewise.explain_dispatch(fusewise.qk_norm_rope, **call).impl == "triton"


def test_gradients_without_triton_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where impl="auto" passes over Triton: CUDA leaves what no kernel of its serves to whatever can serve it."""
    from fusewise.ops.qk_norm_rope import _cuda
    from fusewise.ops.rope import _host

    rotation = (torch.rand(5, 8), torch.rand(5, 8), None, None, None, 0, "", 1e-6, 0.0, "head", "auto")
    x, dy, weight = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16), torch.rand(16)
    want = _op._op_grad([dy], [x], [weight], *rotation, True)
    monkeypatch.setattr(_op, "serving", lambda *_: _cuda)
    monkeypatch.setattr(_cuda, "backward", lambda *_: False)
    with _host.through_python():
        got = _op._op_grad([dy], [x], [weight], *rotation, True)
        with pytest.raises(ValueError, match="triton"):  # that of a named implementation does not fall back further
            _op._op_grad([dy], [x], [weight], *rotation[:-1], "cuda", True)
    for gradient, exact in zip(got, want, strict=True):
        assert torch.equal(gradient, exact)


@pytest.mark.gpu
def test_auto_is_what_explain_dispatch_says_on_a_gpu() -> None:
    call = {name: torch.ones(x.shape, dtype=x.dtype, device="cuda") for name, x in arguments(3).items()}
    fusewise.qk_norm_rope(**call, impl="cuda")  # builds it
    _op._unready.cache_clear()
    assert fusewise.explain_dispatch(fusewise.qk_norm_rope, **call).impl == "cuda"
    for y, again in zip(fusewise.qk_norm_rope(**call), fusewise.qk_norm_rope(**call, impl="cuda"), strict=True):
        assert torch.equal(y, again)
