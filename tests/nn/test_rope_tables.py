"""The frequencies and tables kept by RotaryEmbedding: when they are computed, and that casts, moves, copies, traces and
inference mode leave them correct.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fusewise.nn import RotaryEmbedding
from fusewise.ops.rope import tables

from .test_rope import near, qk, rotated

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}


def test_tables_made_in_inference_mode_serve_training() -> None:
    """Trainers run such a check of a model before training."""
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q, k = qk()
    with torch.inference_mode():
        expected = module(q, k)
    q.requires_grad_()
    y = module(q, k)
    assert torch.equal(y[0], expected[0])
    y[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_frequencies_made_in_inference_mode_serve_training(table: str) -> None:
    """For a module created in inference mode, or given a length there, as generation does."""
    with torch.inference_mode():
        module = RotaryEmbedding(16, seq_len=200, table=table, **DYNAMIC)
    told = RotaryEmbedding(16, table=table, **DYNAMIC)
    with torch.inference_mode():
        told.use_length(200)
    q, k = qk()
    q.requires_grad_()
    y = module(q, k)[0]
    assert torch.equal(y, told(q, k)[0]) and y.requires_grad


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_uses_the_reserved_table(strict: bool) -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=4)
    module.reserve(64)
    table = module.cos
    tokens = {1: torch.export.Dim("tokens", max=60)}
    program = torch.export.export(module, (torch.randn(2, 6, 4, 16),), dynamic_shapes=(tokens,), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["fusewise.rope.default"]
    assert module.cos is table
    q = torch.randn(2, 50, 4, 16)
    assert torch.equal(program.module()(q), module(q))


@pytest.mark.parametrize("given", [{}, {"positions": torch.arange(6)}], ids=["counted", "positions"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_without_a_table_computes_one(given: dict[str, torch.Tensor], strict: bool) -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=64)
    q, _ = qk()
    program = torch.export.export(module, (q,), given, strict=strict)
    assert module.cos is None
    assert torch.equal(program.module()(q, **given), module(q, **given))


def test_tables_of_a_trace_are_not_kept() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q, _ = qk()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(module(mode.from_tensor(q)), torch._subclasses.FakeTensor)
    assert torch.equal(module(q), RotaryEmbedding(16, table="cos_sin")(q))


def test_table_grows_by_doubling_and_only_when_it_must() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    assert module.cos is None
    module(qk(6)[0])
    first = module.cos
    assert first is not None and first.shape == (8, 8)
    module(qk(6)[0], offset=2)
    assert module.cos is first
    module(qk(6)[0], offset=3)
    grown = module.cos
    assert grown is not None and grown.shape == (16, 8) and torch.equal(grown[:8], first)
    module.reserve(100)
    reserved = module.cos
    assert reserved is not None and reserved.shape == (100, 8)
    module.reserve(50)
    module.reserve(50, "cpu:0")  # the same device by another name, like "cuda" and "cuda:0"
    assert module.cos is reserved


def test_positions_beyond_the_table_are_nan_until_reserved() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q = qk()[0]
    positions = torch.tensor([0, 1, 2, 3, 4, 20])
    assert module(q, None, positions)[:, -1].isnan().all() and not module(q, None, positions)[:, :-1].isnan().any()
    module.reserve(21)
    near(module(q, None, positions), rotated(q, positions, module.inv_freq))


def test_what_was_reserved_is_there_after_a_move() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    module.reserve(21)
    q, positions = qk()[0], torch.tensor([0, 1, 2, 3, 4, 20])
    for change in (lambda: module.to("cpu"), module.half, lambda: module.use_length(64)):
        change()
        assert not module(q, None, positions).isnan().any()


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_casting_the_module_does_not_round_what_it_keeps(cast: Any, table: Any) -> None:
    module = RotaryEmbedding(16, table=table)
    q = qk()[0]
    before, frequencies = module(q), module.inv_freq.clone()
    parent = cast(torch.nn.Sequential(module))
    assert parent[0].inv_freq.dtype == torch.float32 and torch.equal(parent[0].inv_freq, frequencies)
    assert torch.equal(module(q), before)


def test_state_dict_is_empty_and_copies_work() -> None:
    module = RotaryEmbedding(16, table="cos_sin")
    module(qk()[0])
    assert not module.state_dict() and not list(module.parameters())
    module.load_state_dict({}, strict=True)
    q = qk()[0]
    assert torch.equal(copy.deepcopy(module)(q), module(q))


def test_meta_construction_gets_right_values_off_the_meta_device() -> None:
    with torch.device("meta"):
        module = RotaryEmbedding(16, base=500.0)
    assert module.inv_freq.is_meta
    module.to_empty(device="cpu")
    assert torch.equal(module.inv_freq, tables.default(rotary_dim=16, base=500.0)[0])


def test_frequencies_of_length_dependent_types_change_only_on_request() -> None:
    module = RotaryEmbedding(16, table="cos_sin", **DYNAMIC)
    short = tables.dynamic(rotary_dim=16, factor=2.0, max_position_embeddings=64)[0]
    module(qk(100)[0])
    assert torch.equal(module.inv_freq, short)
    module.use_length(100)
    long = tables.dynamic(rotary_dim=16, factor=2.0, max_position_embeddings=64, seq_len=100)[0]
    assert torch.equal(module.inv_freq, long) and not torch.equal(long, short)
    q = qk(100)[0]
    near(module(q), rotated(q, torch.arange(100), long))
    plain = RotaryEmbedding(16)
    kept = plain.inv_freq
    plain.use_length(100)
    assert plain.inv_freq is kept


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_compiles_whole_and_once_while_the_length_varies(table: Any) -> None:
    compiles = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    torch._dynamo.reset()
    module = RotaryEmbedding(16, table=table, max_positions=64)
    module.reserve(64)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=count)
    for tokens in (6, 9, 17, 31):
        q, k = qk(tokens)
        for y, x in zip(compiled(q, k), module(q, k), strict=True):
            assert torch.equal(y, x)
    assert compiles == 1


def test_what_cannot_be_reserved_is_not_asked_for_again() -> None:
    module, q = RotaryEmbedding(8, table="cos_sin"), torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="RotaryEmbedding: length must be at most 2147483647, got 8589934592"):
        module.reserve(2**33)
    module.half()(q)
    dynamic = RotaryEmbedding(8, rope_type="dynamic", factor=2.0, max_position_embeddings=16)
    with pytest.raises(ValueError, match="seq_len must be"):
        dynamic.use_length(-1)
    assert dynamic.rope_arguments.get("seq_len") != -1


def test_threads_may_share_a_module_whose_table_grows() -> None:
    """A call uses cos and sin from one table, whatever other threads store meanwhile."""
    module = RotaryEmbedding(8, table="cos_sin", max_positions=1)
    made = tables.cos_sin

    def grown_meanwhile(*arguments: Any, **options: Any) -> Any:
        found = made(*arguments, **options)
        module.cos, module.sin = made(module._frequencies, 64)  # another thread, which needed more
        return found

    q = torch.randn(1, 4, 2, 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tables, "cos_sin", grown_meanwhile)
        one = module.arguments(q)
    assert one["cos"].shape == one["sin"].shape == (4, 4)
    module.cos = made(module._frequencies, 128)[0]  # it has stored one of the two
    other = module.arguments(q)
    assert other["cos"].shape == other["sin"].shape
    module.sin = torch.empty_like(other["sin"], device="meta")  # one of the two on another device
    assert module.arguments(q)["sin"].device == q.device


def test_a_model_without_memory_gets_its_frequencies_at_a_call_or_a_move() -> None:
    """As after weights were assigned: then only these buffers are on the meta device."""
    q = torch.randn(1, 3, 2, 64)
    want = RotaryEmbedding(64)(q)

    def made() -> RotaryEmbedding:
        with torch.device("meta"):
            return RotaryEmbedding(64)

    halved = made().half()
    assert halved(q.to("meta")).is_meta
    for module in (made(), made().to("cpu"), halved, torch.compile(made(), backend="eager", fullgraph=True)):
        assert torch.equal(module(q), want)
