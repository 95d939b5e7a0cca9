"""fusewise.compat.flash_attn against its documented semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, assert_transforms, launches, rotate
from torch import Tensor

from fusewise.compat.flash_attn import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)

B, T, H, D, ROWS = 2, 5, 4, 16, 12


def table(rotary_dim: int = D, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def rows(t: Tensor, offset: int | Tensor) -> Tensor:
    """(B or 1, T, 1, P): the table rows of the tokens."""
    start = torch.as_tensor(offset, device=DEVICE).view(-1, 1)
    return t[start + torch.arange(T, device=DEVICE)][:, :, None]


def tensor_offset() -> Tensor:
    return torch.tensor([3, 0], device=DEVICE, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [D, 8])
@pytest.mark.parametrize("offset", [0, 2, "tensor"])
def test_apply_rotary_emb(dtype: torch.dtype, interleaved: bool, rotary_dim: int, offset: Any) -> None:
    offset = tensor_offset() if offset == "tensor" else offset
    cos, sin = table(rotary_dim, dtype=dtype)
    x = randn(B, T, H, D, dtype=dtype).requires_grad_()

    def statement(x: Tensor) -> Tensor:
        return rotate(x, rows(cos, offset), rows(sin, offset), interleaved=interleaved)

    y = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offset)
    assert y.dtype == dtype
    assert_rotated(y, statement(x))
    assert_gradient(y, x, statement)
    in_place = x.detach().clone()
    assert apply_rotary_emb(in_place, cos, sin, interleaved, True, offset) is in_place
    assert torch.equal(in_place, y)


def test_apply_rotary_emb_of_packed_sequences() -> None:
    cos, sin = table()
    bounds = torch.tensor([0, 4, 5, 9], device=DEVICE, dtype=torch.int32)
    offsets = torch.tensor([1, 7, 0], device=DEVICE)
    position = torch.tensor([1, 2, 3, 4, 7, 0, 1, 2, 3], device=DEVICE)
    x = randn(9, H, D)
    y = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=bounds, max_seqlen=4)
    assert_rotated(y, rotate(x, cos[position, None], sin[position, None]))
    with pytest.raises(
        ValueError, match=r"cos must have a row for each of 0 \+ max_seqlen = 13 positions, got 12 rows"
    ):
        apply_rotary_emb(x, cos, sin, cu_seqlens=bounds, max_seqlen=13)


def test_the_raw_function_and_the_torch_form() -> None:
    cos, sin = table()
    x = randn(B, T, H, D)
    assert_rotated(apply_rotary(x, cos, sin, 2, conjugate=True), rotate(x, rows(cos, 2), -rows(sin, 2)))
    y = x.clone()
    assert apply_rotary(y, cos, sin, inplace=True, interleaved=True) is y
    assert_rotated(y, rotate(x, rows(cos, 0), rows(sin, 0), interleaved=True))
    each = torch.stack((cos[:T], cos[2 : T + 2])), torch.stack((sin[:T], sin[2 : T + 2]))
    assert_rotated(apply_rotary_emb_torch(x, *each), rotate(x, each[0][:, :, None], each[1][:, :, None]))


def test_tables_and_offsets_of_any_strides() -> None:
    cos, sin = table()
    x = randn(B, T, H, D)
    offsets = torch.tensor([2], device=DEVICE).expand(B)
    for y in (
        apply_rotary_emb(x, cos, sin.mT.contiguous().mT, seqlen_offsets=offsets),
        apply_rotary_emb(x.clone(), cos.mT.contiguous().mT, sin, inplace=True, seqlen_offsets=offsets),
    ):
        assert_rotated(y, rotate(x, rows(cos, 2), rows(sin, 2)))
    y = apply_rotary_emb_torch(x, cos[:T], sin[:T].mT.contiguous().mT)
    assert_rotated(y, rotate(x, rows(cos, 0), rows(sin, 0)))


def test_a_last_dimension_that_is_not_contiguous() -> None:
    cos, sin = table()
    x = randn(B, T, D, H).transpose(2, 3)
    assert_rotated(apply_rotary_emb(x, cos, sin), rotate(x, rows(cos, 0), rows(sin, 0)))
    with pytest.raises(ValueError, match=r"rope_: q must have a contiguous last dimension"):
        apply_rotary_emb(x, cos, sin, inplace=True)


# A packed tensor: how it is made, and which heads are q, k and the rest once (3, H) is one dimension.
PACKED = {
    "stacked": lambda: randn(B, T, 3, H, D),
    "gqa": lambda: randn(B, T, H + 2 * 2, D),
    "three first": lambda: randn(3, B, T, H, D).permute(1, 2, 0, 3, 4),
    "slice": lambda: randn(B, T, 4, H, D)[:, :, :3],
}


def qkv_statement(cos: Tensor, sin: Tensor, cos_k: Tensor, sin_k: Tensor, offset: Any, interleaved: bool) -> Any:
    def statement(qkv: Tensor) -> Tensor:
        heads = qkv.flatten(2, 3) if qkv.dim() == 5 else qkv
        q, k, v = heads.split([H, (heads.shape[2] - H) // 2, (heads.shape[2] - H) // 2], dim=2)
        q = rotate(q, rows(cos, offset), rows(sin, offset), interleaved=interleaved)
        k = rotate(k, rows(cos_k, offset), rows(sin_k, offset), interleaved=interleaved)
        return torch.cat((q, k, v.double()), 2).view(qkv.shape)

    return statement


@pytest.mark.parametrize("which", ["q", "k"])
def test_tables_that_were_not_made_together(which: str) -> None:
    """cos and sin of unlike strides are taken for q and for k alike."""
    tables = {"q": table(8), "k": table(8, seed=1)}
    cos, sin = tables[which]
    tables[which] = cos, sin.t().contiguous().t()
    (cos, sin), (cos_k, sin_k) = tables.values()
    qkv = randn(B, T, 3, H, D)
    expected = qkv_statement(cos, sin, cos_k, sin_k, 0, False)(qkv)
    assert_rotated(apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k), expected)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("offset", [1, "tensor"])
def test_apply_rotary_emb_qkv_(form: str, interleaved: bool, separate: bool, offset: Any) -> None:
    offset = tensor_offset() if offset == "tensor" else offset
    heads_q = H if form == "gqa" else None
    cos, sin = table(8)
    cos_k, sin_k = table(8, seed=1) if separate else (cos, sin)
    statement = qkv_statement(cos, sin, cos_k, sin_k, offset, interleaved)
    tables = (cos, sin, cos_k, sin_k) if separate else (cos, sin, None, None)

    def call(qkv: Tensor) -> Tensor:
        return apply_rotary_emb_qkv_(qkv, *tables, interleaved, offset, heads_q)

    qkv = PACKED[form]()
    expected = statement(qkv)
    assert call(qkv) is qkv
    assert_rotated(qkv, expected)

    leaf = PACKED[form]().requires_grad_()
    before = leaf.detach().clone()
    y = call(leaf)
    assert y.data_ptr() == leaf.data_ptr()
    assert_rotated(y, statement(before))
    assert_gradient(y, leaf, lambda x: statement(x.detach() * 0 + x))

    source = PACKED[form]().requires_grad_()
    hidden = source * 2
    y = call(hidden)
    assert torch.equal(y, hidden)
    assert_gradient(hidden, source, lambda x: statement(2 * x))  # the handle and the result are one


def test_apply_rotary_emb_kv_() -> None:
    cos, sin = table()

    def statement(kv: Tensor) -> Tensor:
        return torch.stack((rotate(kv[:, :, 0], rows(cos, 2), rows(sin, 2)), kv[:, :, 1].double()), 2)

    kv = randn(B, T, 2, H, D)
    expected = statement(kv)
    assert apply_rotary_emb_kv_(kv, cos, sin, seqlen_offsets=2) is kv
    assert_rotated(kv, expected)
    leaf = randn(B, T, 2, H, D).requires_grad_()
    assert_gradient(apply_rotary_emb_kv_(leaf, cos, sin, seqlen_offsets=2), leaf, statement)


def test_derivatives_of_every_order_in_place() -> None:
    cos, sin = (t.double() for t in table(8))
    kv, qkv = randn(1, 2, 2, 1, 8).double().requires_grad_(), randn(1, 2, 4, 8).double().requires_grad_()
    for function, x in (
        (lambda x: apply_rotary_emb_kv_(x.clone(), cos, sin), kv),
        (lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, num_heads_q=2), qkv),
        (lambda x: apply_rotary_emb(x.clone(), cos, sin, inplace=True), qkv),
    ):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)
        assert not torch.autograd.grad(function(x).sgn().sum(), x)[0].any()  # zeros without memory


IN_PLACE: dict[str, tuple[tuple[int, ...], Any]] = {
    "one": ((B, T, H, D), lambda x, t, _: apply_rotary_emb(x, *t, inplace=True)),
    "stacked": ((B, T, 3, H, D), lambda x, t, _: apply_rotary_emb_qkv_(x, *t)),
    "with tables for k": ((B, T, 3, H, D), lambda x, t, k: apply_rotary_emb_qkv_(x, *t, *k)),
    "heads": ((B, T, 2 * H, D), lambda x, t, _: apply_rotary_emb_qkv_(x, *t, num_heads_q=H)),
    "kv": ((B, T, 2, H, D), lambda x, t, _: apply_rotary_emb_kv_(x, *t)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
@pytest.mark.parametrize("form", IN_PLACE)
def test_transforms_in_place(form: str) -> None:
    shape, function = IN_PLACE[form]
    tables = table(), table(seed=1)
    assert_transforms(lambda x: function(x, *tables), randn(*shape))
    xs = randn(2, *shape)
    want = torch.stack([function(x.clone(), *tables) for x in xs])
    torch.func.vmap(lambda x: function(x, *tables))(xs)
    torch.testing.assert_close(xs, want)


@pytest.mark.parametrize("form", ["view of the whole", "slice", "view of a leaf"])
def test_in_place_through_a_view(form: str) -> None:
    cos, sin = table()
    source = randn(B, T, 3 * H * D).requires_grad_()
    hidden = source if form == "view of a leaf" else source * 2
    factor = 1 if form == "view of a leaf" else 2
    packed = hidden.view(B, T, 3, H, D)

    def statement(x: Tensor, parts: int) -> Tensor:
        q, k, v = (factor * x).view(B, T, 3, H, D).unbind(2)
        q, k = (rotate(t, rows(cos, 0), rows(sin, 0)) if i < parts else t for i, t in enumerate((q, k)))
        return torch.stack((q.double(), k.double(), v.double()), 2).flatten(2)

    if form == "slice":
        y = apply_rotary_emb(packed[:, :, 0], cos, sin, inplace=True)
        assert torch.equal(y, packed[:, :, 0])
        assert_gradient(hidden, source, lambda x: statement(x, 1))
        return
    y = apply_rotary_emb_qkv_(packed, cos, sin)
    assert y.data_ptr() == hidden.data_ptr()
    assert_gradient(y.flatten(2), source, lambda x: statement(x, 2))
    if form == "view of the whole":  # one launch backward and the copy of v; and every handle has the gradient
        g = torch.randn_like(y)
        again = apply_rotary_emb_qkv_((source * 2).view(B, T, 3, H, D), cos, sin)
        counted = launches(torch.autograd.grad, again, source, g)
        assert counted == {"fusewise::rope_out": 1, "aten::copy_": 1, "aten::mul": 1}
        packed = (source * 2).view(B, T, 3, H, D)
        apply_rotary_emb_qkv_(packed, cos, sin)
        assert_gradient(packed.flatten(2), source, lambda x: statement(x, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_on_a_leaf_that_views_a_tensor_without_gradient(dtype: torch.dtype) -> None:
    cos, sin = (t.to(dtype) for t in table())
    base = randn(B * T, H, D).to(dtype)
    before = base.clone().view(B, T, H, D)
    x = base.view(B, T, H, D).requires_grad_()

    def statement(x: Tensor) -> Tensor:
        return rotate(x, rows(cos, 0), rows(sin, 0))

    y = apply_rotary_emb(x, cos, sin, inplace=True)
    assert y.data_ptr() == base.data_ptr()
    assert_rotated(y, statement(before))
    g = torch.randn_like(y)
    expected = torch.autograd.grad(statement(before.requires_grad_()), before, g.double())[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0].double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_one_of_several_views_is_refused_before_it_is_written() -> None:
    hidden = randn(B, T, 3, H, D).requires_grad_() * 2
    before = hidden.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"q must not be one of several views made at once.*, got such a view; slice"
    ):
        apply_rotary_emb(hidden.unbind(2)[0], *table(), inplace=True)
    assert torch.equal(hidden, before)


def test_offsets_changed_before_backward_are_noticed() -> None:
    offset = tensor_offset()
    y = apply_rotary_emb_qkv_(randn(B, T, 3, H, D).requires_grad_(), *table(), seqlen_offsets=offset)
    offset += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_one_launch_and_nothing_else() -> None:
    cos, sin = table()
    x, qkv = randn(B, T, H, D), randn(B, T, 3, H, D)
    assert launches(apply_rotary_emb, x, cos, sin) == {"fusewise::rope": 1}
    assert launches(apply_rotary_emb, x, cos, sin, inplace=True) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_qkv_, qkv, cos, sin) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_qkv_, qkv[:, :, 0], cos, sin, num_heads_q=2) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_kv_, qkv[:, :, :2], cos, sin) == {"fusewise::rope_": 1}
    y, g = apply_rotary_emb_qkv_(qkv.requires_grad_(), cos, sin), torch.randn_like(qkv)
    assert launches(torch.autograd.grad, y, qkv, g) == {"fusewise::rope_out": 1, "aten::copy_": 1}  # the copy: v


# dynamo makes an instance of every autograd function that it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(grad: bool) -> None:
    torch._dynamo.reset()
    cos, sin = table()

    def function(x: Tensor, qkv: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        x, qkv, kv = x * 1, qkv * 1, kv * 1
        y = apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=1)
        return (
            y,
            apply_rotary_emb(y, cos, sin),
            apply_rotary_emb_qkv_(qkv, cos, sin),
            apply_rotary_emb_kv_(kv, cos, sin),
            qkv,
        )

    inputs = [randn(B, T, H, D), randn(B, T, 3, H, D), randn(B, T, 2, H, D)]
    inputs = [x.requires_grad_(grad) for x in inputs]
    eager = function(*inputs)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)
    if grad:
        g = [torch.randn_like(y) for y in eager]
        for a, b in zip(torch.autograd.grad(compiled, inputs, g), torch.autograd.grad(eager, inputs, g), strict=True):
            torch.testing.assert_close(a, b)


def test_rotary_embedding_forgets_the_tables_of_a_trace() -> None:
    module = RotaryEmbedding(D, device=DEVICE)
    qkv = randn(B, T, 3, H, D)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(qkv))
    assert torch.equal(module(qkv.clone()), RotaryEmbedding(D, device=DEVICE)(qkv.clone()))


def test_rotary_embedding_trains_after_inference_mode() -> None:
    module = RotaryEmbedding(D, device=DEVICE)
    qkv = randn(B, T, 3, H, D)
    with torch.inference_mode():
        expected = module(qkv.clone())
    x = qkv.clone().requires_grad_()
    y = module(x * 1)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_embedding_tables_as_flash_attn_reads_them(scale_base: float | None) -> None:
    module = RotaryEmbedding(D, scale_base=scale_base, device=DEVICE)
    names = ("_cos_cached", "_sin_cached", "_cos_k_cached", "_sin_k_cached")
    assert [getattr(module, name) for name in names] == [None] * 4
    module(randn(B, T, 3, H, D, dtype=torch.bfloat16))
    rounded, made = [getattr(module, name) for name in names], module._tables
    module._update_cos_sin_cache(T)
    assert module._tables is made
    exact = [getattr(module, name) for name in names]
    for table, wide in zip(rounded[: 2 if scale_base is None else 4], exact, strict=False):
        assert table.dtype == torch.bfloat16 and wide.dtype == torch.float32 and wide.shape == (T, D // 2)
        assert torch.equal(table, wide.bfloat16())
    cos_k, sin_k = exact[:2] if scale_base is None else exact[2:]
    torch.testing.assert_close(exact[0] * cos_k + exact[1] * sin_k, torch.ones(T, D // 2, device=DEVICE))
    assert scale_base is not None or exact[2:] == rounded[2:] == [None, None]
    module._update_cos_sin_cache(ROWS, device=exact[0].device, dtype=torch.float16)
    assert module._cos_cached.dtype == torch.float16 and len(module._cos_cached) == ROWS


class Halved(RotaryEmbedding):
    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return super()._compute_inv_freq(device) / 2


def test_rotary_embedding_frequencies_are_the_buffer() -> None:
    qkv = randn(B, T, 3, H, D)
    halves = RotaryEmbedding(D, device=DEVICE)._compute_inv_freq(DEVICE) / 2
    angles = torch.arange(T, device=DEVICE)[:, None] * halves
    expected = apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin())
    given = RotaryEmbedding(D, device=DEVICE)
    given.inv_freq.copy_(halves)
    with torch.device("meta"):
        empty = Halved(D)
    cast = Halved(D, device=DEVICE).bfloat16()
    assert cast.inv_freq.dtype == torch.bfloat16
    for module in (given, Halved(D, device=DEVICE), cast, empty.to_empty(device=DEVICE)):
        assert torch.equal(module(qkv.clone()), expected)


def test_rotary_embedding_positions_in_the_dtype_of_a_cast_module() -> None:
    """As models that were trained wholly in bfloat16 by flash-attn of that time need them: 257 is 256 there."""
    for pos_idx_in_fp32 in (True, False):
        module = RotaryEmbedding(D, device=DEVICE, pos_idx_in_fp32=pos_idx_in_fp32)
        module._update_cos_sin_cache(300)
        exact = module._cos_cached
        module.bfloat16()._tables = ()
        module._update_cos_sin_cache(300)
        rounded = (torch.arange(300, device=DEVICE).bfloat16()[:, None] * module.inv_freq).cos().float()
        assert torch.equal(module._cos_cached, exact if pos_idx_in_fp32 else rounded)
        assert torch.equal(module._cos_cached[257], module._cos_cached[256]) != pos_idx_in_fp32


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_module(scale_base: float | None, interleaved: bool) -> None:
    module = RotaryEmbedding(8, base=100.0, interleaved=interleaved, scale_base=scale_base, device=DEVICE)
    assert module.state_dict() == {}
    i, p = torch.arange(4, device=DEVICE).double(), torch.arange(T, device=DEVICE).double()
    angles = p[:, None] * 100.0 ** (-2 * i / 8)
    growth = torch.ones_like(angles)
    if scale_base is not None:
        growth = ((2 * i + 0.4 * 8) / (1.4 * 8)) ** ((p[:, None] - T // 2) / scale_base)
    q_table = [(growth * f)[None, :, None] for f in (angles.cos(), angles.sin())]
    k_table = [(f / growth)[None, :, None] for f in (angles.cos(), angles.sin())]

    qkv = randn(B, T, 3, H, D)
    q, k, v = qkv.clone().unbind(2)
    expected = rotate(q, *q_table, interleaved=interleaved), rotate(k, *k_table, interleaved=interleaved)
    y = module(qkv)
    assert y is qkv
    assert_rotated(y, torch.stack((*expected, v.double()), 2), angle_error=1e-6)

    q_in, kv_in = q.clone(), torch.stack((k, v), 2)
    q_out, kv_out = module(q_in, kv_in)
    assert_rotated(q_out, expected[0], angle_error=1e-6)
    assert_rotated(kv_out, torch.stack((expected[1], v.double()), 2), angle_error=1e-6)

    if scale_base is None:  # XPos scales by distance from the middle of the table
        shifted = module(
            torch.stack((q, k, v), 2)[:, :2].clone(), seqlen_offset=torch.tensor([1, 3], device=DEVICE), max_seqlen=T
        )
        at = torch.tensor([[1, 2], [3, 4]], device=DEVICE)
        assert_rotated(
            shifted[:, :, 0],
            rotate(q[:, :2], q_table[0][0, at.flatten(), 0].view(2, 2, 1, 4), q_table[1][0, at.flatten(), 0].view(2, 2, 1, 4), interleaved=interleaved),
            angle_error=1e-6,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 2, H, D), c, s), ValueError, "qkv must have shape (B, T, 3, H, D)"),
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, H), c, s), ValueError, "qkv must have 4 or 5 dimensions"),
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, H, D), c, s), ValueError, "num_heads_q must leave an even number"),
        (
            lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 8, D), c, s, num_heads_q=3),
            ValueError, "num_heads_q must leave an even number of the 8 heads to k and v, got 3",
        ),
        (lambda c, s: apply_rotary_emb_kv_(randn(1, 2, 3, H, D), c, s), ValueError, "kv must have shape (B, T, 2, H, D)"),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, D), c[None], s[None]), ValueError, "cos must have shape (R, rotary_dim"),
        (
            lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 3, H, D), c, s, c[0], s[0]),
            ValueError, "cos_k must have shape (R, rotary_dim / 2), got (8,)",
        ),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, 8), c, s), ValueError, "rotary_dim must be even and from 2 to head_dim"),
        (lambda c, s: apply_rotary_emb(randn(1, 99, H, D), c, s), ValueError, "the table must have a row for each"),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, D).int(), c, s), TypeError, "q must have dtype"),
        (lambda c, s: RotaryEmbedding(D)(randn(1, 2, 3, H, D), seqlen_offset=torch.zeros(1)), ValueError, "max_seqlen must be given"),
        (lambda c, s: RotaryEmbedding(D, 1e4, False, None, True), ValueError, "device must be a device or None"),  # type: ignore[misc]
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=r", got .*; ") as raised:
        call(*table())
    assert message in str(raised.value)
