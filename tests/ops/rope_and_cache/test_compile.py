"""The torch operators: schemas, fake tensors, torch.compile without recompilation and without copies of the caches."""

from __future__ import annotations

import ast
import math
import re

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch._inductor.config
import torch._inductor.utils
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise.ops._register import _COPIES_WRONGLY
from fusewise.ops.rope._validate import DEFAULTS
from fusewise.ops.rope_and_cache._validate import validated

from .cases import CASES, Made, check, make

HEADS, KV_HEADS, WIDTH = 4, 2, 16


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", ["vllm", "flashinfer-hnd", "keeps k", "block table", "contiguous packed", "slots of a part"]
)
def test_opcheck(name: str) -> None:
    """Schema (exactly the declared mutations), fake tensors and tracing of the operator."""
    made = make(CASES[name])
    arguments = made.arguments()
    own = [arguments.pop(n, None) for n in ("key_cache", "value_cache", "slot_mapping", "block_table")]
    layout, write_k = arguments.pop("cache_layout"), arguments.pop("write_k", True)
    options = tuple({**DEFAULTS, **arguments, "impl": "reference"}.values())
    tensors, call, _ = validated(made.q, made.k, made.v, *own, layout, write_k, options)
    operator = torch.ops.fusewise.rope_and_cache_ if write_k else torch.ops.fusewise.rope_and_cache_keep_k_
    torch.library.opcheck(operator.default, (*tensors, *call))


def step(
    qkv: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor
) -> Tensor:
    """A layer: views of the packed projection, rotation and cache write, then a use of q and k."""
    q, k, v = (qkv * 2).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
    fusewise.rope_and_cache_(
        q, k, v, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, positions=positions, cos_sin=table
    )
    return q.sum(-1) + k.sum(-1)


def arguments_of(tokens: int) -> tuple[Tensor, ...]:
    key_cache, value_cache = (torch.randn(8, 16, KV_HEADS, WIDTH) for _ in range(2))
    return (
        torch.randn(tokens, (HEADS + 2 * KV_HEADS) * WIDTH), key_cache, value_cache, torch.randperm(128)[:tokens] - 1,
        torch.arange(tokens), torch.randn(64, WIDTH),
    )  # fmt: skip


def copy_of(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in given)


def test_fullgraph_without_recompiling_for_a_number_of_tokens() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (5, 7, 33, 2, 60):
        given = arguments_of(tokens)
        expected, actual = copy_of(given), copy_of(given)
        want, got = step(*expected), compiled(*actual)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
        for x, y in zip(actual, expected, strict=True):
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)
        assert not torch.equal(actual[1], given[1]) and not torch.equal(actual[2], given[2])
    assert counter.frame_count <= 2, "one graph for the first number of tokens, one for all others"


def in_pages(qkv: Tensor, caches: Tensor, *rest: Tensor) -> Tensor:
    """The same with FlashInfer's combined cache, unbound inside the graph."""
    return step(qkv, *caches.unbind(1), *rest)


@pytest.mark.parametrize("combined", [False, True], ids=["two caches", "a combined cache"])
def test_compiled_code_copies_no_cache(combined: bool) -> None:
    """Inductor's code writes into the caches directly and allocates nothing of their size."""
    qkv, key_cache, value_cache, *rest = arguments_of(6)
    caches = (torch.stack((key_cache, value_cache), 1),) if combined else (key_cache, value_cache)
    if combined and _COPIES_WRONGLY:
        with pytest.raises(Exception, match=r"key_cache must be all of its memory under torch\.compile"):
            torch.compile(in_pages, fullgraph=True)(qkv, *caches, *rest)
        return
    compiled = torch.compile(in_pages if combined else step, fullgraph=True)
    # Cached code for inputs that share memory would be reused for others, and it copies.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        _, (text,) = torch._inductor.utils.run_and_get_code(compiled, qkv, *caches, *rest)
    assert "fusewise.rope_and_cache_" in text
    made = [ast.literal_eval(shape) for shape in re.findall(r"empty_strided_cpu\((\([^()]*\))", text)]
    assert made, "the rotated q and k are made here"
    assert max(math.prod(shape) for shape in made) < key_cache.numel(), made


@pytest.mark.parametrize("name", ["vllm", "keeps k", "hnd", "flat", "block table", "contiguous", "block table packed"])
def test_compiled_matches_the_oracle(name: str) -> None:
    made = make(CASES[name])
    if _COPIES_WRONGLY:  # caches with separate memory
        made.key_cache, made.value_cache = made.key_cache.clone(), made.value_cache.clone()
    before, old = made.copy()
    after, new = before.copy()

    def call(made: Made) -> None:
        # A fixed implementation, so that k and the cache are bitwise equal even if a separate operator rotates k.
        fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments(), impl="reference")

    torch.compile(call, fullgraph=True, backend="aot_eager")(after)
    check(before, after, (old, new), CASES[name].options.get("write_k", True))


@pytest.mark.skipif(_COPIES_WRONGLY, reason="before torch 2.13 a compiled call takes caches with memory of their own")
@pytest.mark.parametrize("message", ["q must not have elements that share", "value_cache must not overlap key_cache"])
def test_compiled_writes_into_shared_memory_are_refused(message: str) -> None:
    x, cache = torch.randn(3, 2, WIDTH), torch.randn(8, 16, 2, WIDTH)
    q = x[:1].expand(3, 2, WIDTH) if message.startswith("q") else x.clone()
    caches = (cache, cache[1:]) if "value_cache" in message else (cache, cache.clone())
    f = torch.compile(
        lambda q, key_cache, value_cache: fusewise.rope_and_cache_(
            q,
            x.clone(),
            x,
            key_cache[:7],
            value_cache[:7],
            slot_mapping=torch.arange(3),
            inv_freq=torch.ones(WIDTH // 2),
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match=f"rope_and_cache_: {message}"):
        f(q, *caches)


def test_fake_tensors_are_checked_and_nothing_runs() -> None:
    """Also after a valid call of the same type."""
    given = arguments_of(3)
    step(*copy_of(given))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        assert step(*fakes).shape == (3,)
        with pytest.raises(ValueError, match=r"slot_mapping must have shape \(3,\)"):
            step(*fakes[:3], fakes[3].repeat(2), *fakes[4:])


@pytest.mark.skipif(_COPIES_WRONGLY, reason="before torch 2.13 the caches may not be parts of a tensor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inputs_with_a_storage_offset_of_which_parts_are_written(backend: str) -> None:
    """Torch 2.13 takes the storage offset of a part for its start within the graph's input."""
    tokens, heads = 5, HEADS + 2 * KV_HEADS
    qkv, caches = torch.randn(3, tokens, heads, WIDTH), torch.randn(3, 16, 16, KV_HEADS, WIDTH)
    slots, positions, table = torch.arange(tokens), torch.arange(tokens), torch.randn(64, WIDTH)

    def layer(qkv: Tensor, caches: Tensor) -> None:
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        fusewise.rope_and_cache_(
            q,
            k,
            v,
            key_cache=caches[:8],
            value_cache=caches[8:],
            slot_mapping=slots,
            positions=positions,
            cos_sin=table,
        )

    expected = qkv.clone(), caches.clone()
    layer(*(x[1] for x in expected))
    torch.compile(layer, fullgraph=True, backend=backend)(qkv[1], caches[1])
    torch.testing.assert_close((qkv, caches), expected, rtol=0, atol=0)


def test_gradients_are_refused_when_traced() -> None:
    given = arguments_of(3)
    given[0].requires_grad_()
    with pytest.raises(Exception, match="must not require grad: a write into a cache has no gradient"):
        torch.compile(step, fullgraph=True, backend="eager")(*given)


def test_the_dispatch_is_explained() -> None:
    made = make(CASES["vllm"])
    told = fusewise.explain_dispatch(fusewise.rope_and_cache_, made.q, made.k, made.v, **made.arguments())
    assert (told.op, told.impl) == ("rope_and_cache_", "reference")
    assert told.passed_over["cuda"] == "cuda runs on NVIDIA GPUs, not on device type cpu"
    assert "triton" in told.passed_over


@pytest.mark.parametrize(("index", "fix"), [(2, "call .contiguous()"), (3, "allocate it"), (4, "allocate it")], ids=["v", "key_cache", "value_cache"])  # fmt: skip
def test_the_operator_refuses_strides_that_an_exported_program_may_be_given(index: int, fix: str) -> None:
    """Only the strides of its trace were validated. Nothing is written, and no copy of a cache is advised."""
    made = make(CASES["vllm"])
    slots, table = made.kwargs["slot_mapping"], made.kwargs["cos_sin"]
    tensors = [made.q, made.k, made.v, made.key_cache, made.value_cache]
    tensors[index] = tensors[index].transpose(-1, -2).contiguous().transpose(-1, -2)
    before = [x.clone() for x in tensors]
    rotation = table, None, made.kwargs["positions"], None, None, 0, "layout=thd table=fused", "reference"
    with pytest.raises(
        ValueError,
        match=rf"_cache_: (v|key_cache|value_cache) must have a contiguous last dimension .*; {re.escape(fix)}",
    ):
        torch.ops.fusewise.rope_and_cache_(*tensors, slots, None, *rotation)
    assert all(map(torch.equal, tensors, before))
