"""fusewise.compat.transformer_engine against its documented semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from compat_statement import DEVICE, assert_gradient, assert_rotated, assert_transforms, launches, rotate
from torch import Tensor

from fusewise.compat.transformer_engine import (
    FusedQKVRoPEFunc,
    FusedRoPEFunc,
    RotaryPositionEmbedding,
    SwiGLU,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

B, T, H, D, ROWS = 2, 6, 4, 16, 40


def freqs(width: int = D, interleaved: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The argument (R, 1, 1, width), and its angles without duplication (R, width / 2)."""
    angles = (torch.rand(ROWS, width // 2, generator=torch.Generator().manual_seed(seed)) * 9).to(DEVICE)
    twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return twice[:, None, None], angles


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def position_of(tokens: int, cp_size: int, cp_rank: int) -> list[int]:
    """Reference positions of a rank's tokens: its two chunks of the whole sequence."""
    half = tokens // 2
    if cp_size == 1:
        return list(range(tokens))
    whole = [list(range(i * half, (i + 1) * half)) for i in range(2 * cp_size)]
    return whole[cp_rank] + whole[2 * cp_size - 1 - cp_rank]


def table_rows(angles: Tensor, tokens: int, start: list[int], cp: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """cos, sin (B, T, 1, P) for batch entries starting at positions `start`."""
    at = torch.tensor([[p + s for p in position_of(tokens, *cp)] for s in start], device=DEVICE)
    return angles.double()[at].cos()[:, :, None], angles.double()[at].sin()[:, :, None]


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [None, [3, 0]])
@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(("width", "dtype"), [(D, torch.float32), (8, torch.bfloat16)])
def test_apply_rotary_pos_emb(
    tensor_format: str, interleaved: bool, start: Any, cp: Any, width: int, dtype: torch.dtype
) -> None:
    argument, angles = freqs(width, interleaved)
    batched = tensor_format == "bshd"
    t = randn(B, T, H, D, dtype=dtype) if batched else randn(T, B, H, D, dtype=dtype)
    t.requires_grad_()

    def statement(t: Tensor) -> Tensor:
        cos, sin = table_rows(angles, T, start or [0, 0], cp)
        x = rotate(t if batched else t.transpose(0, 1), cos, sin, interleaved=interleaved)
        return x if batched else x.transpose(0, 1)

    starts = None if start is None else ints(*start)
    for fused in (False, True):
        y = apply_rotary_pos_emb(t, argument, tensor_format, starts, interleaved, fused, cp_size=cp[0], cp_rank=cp[1])
        assert y.is_contiguous() and y.dtype == dtype
        assert_rotated(y, statement(t), angle_error=1e-6)
    assert_gradient(y, t, statement)


@pytest.mark.parametrize("swapped", [(0, 1), (2, 3), (1, 2)])
def test_the_result_and_its_gradient_are_contiguous_whatever_the_input(swapped: tuple[int, int]) -> None:
    argument, angles = freqs()
    t = randn(T, B, H, D).transpose(*swapped).contiguous().transpose(*swapped).requires_grad_()
    hidden = t * 1
    hidden.retain_grad()
    y = apply_rotary_pos_emb(hidden, argument)
    y.sum().backward()
    assert not hidden.is_contiguous() and y.is_contiguous() and hidden.grad is not None
    assert hidden.grad.is_contiguous()
    cos, sin = table_rows(angles, T, [0, 0], (1, 0))
    assert_rotated(y, rotate(t, cos.transpose(0, 1), sin.transpose(0, 1)))


@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("start", [None, [2, 0, 1]])
def test_packed_sequences(cp: tuple[int, int], start: Any) -> None:
    argument, angles = freqs()
    lengths = [4, 8, 4]  # of the whole sequences
    local = [n // cp[0] for n in lengths]
    t = randn(sum(local), H, D)
    at = [p + s for n, s in zip(local, start or [0] * 3, strict=True) for p in position_of(n, *cp)]
    cos, sin = (f(angles.double()[at])[:, None] for f in (torch.cos, torch.sin))
    starts = None if start is None else ints(*start)
    y = apply_rotary_pos_emb(
        t, argument, "thd", starts, cu_seqlens=ints(0, 4, 12, 16), cp_size=cp[0], cp_rank=cp[1]
    )  # fmt: skip
    assert_rotated(y, rotate(t, cos, sin), angle_error=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("start", "cp"), [(None, (1, 0)), ([3, 0], (1, 0)), (None, (2, 1))])
def test_the_autograd_functions(interleaved: bool, start: Any, cp: tuple[int, int]) -> None:
    """Their argument order has start_positions before tensor_format."""
    argument, angles = freqs(interleaved=interleaved)
    starts = None if start is None else ints(*start)
    cos, sin = table_rows(angles, T, start or [0, 0], cp)
    t = randn(B, T, H, D).requires_grad_()

    def statement(t: Tensor) -> Tensor:
        return rotate(t, cos, sin, interleaved=interleaved)

    y = FusedRoPEFunc.apply(t, argument, starts, "bshd", interleaved, None, *cp)
    assert_rotated(y, statement(t), angle_error=1e-6)
    assert_gradient(y, t, statement)
    packed = FusedRoPEFunc.apply(t[0], argument, None, "thd", interleaved, ints(0, 2, T))
    restarted = [0, 1, *range(T - 2)]
    cos_t, sin_t = (f(angles.double()[restarted])[:, None] for f in (torch.cos, torch.sin))
    assert_rotated(packed, rotate(t[0], cos_t, sin_t, interleaved=interleaved), angle_error=1e-6)

    qkv = randn(B, T, 2, 4 * D).requires_grad_()
    q, k, v = FusedQKVRoPEFunc.apply(qkv, argument, argument, [2 * D, D, D], starts, "bshd", interleaved, *cp)

    def parts(qkv: Tensor) -> tuple[Tensor, ...]:
        heads, one, rest = qkv.split([2 * D, D, D], -1)
        return statement(heads.reshape(B, T, 4, D)), statement(one), rest.double()

    for x, exact in zip((q, k, v), parts(qkv), strict=True):
        assert_rotated(x, exact, angle_error=1e-6)
    assert_gradient((q, k, v), qkv, parts)


def test_angles_of_each_sequence() -> None:
    argument, angles = torch.cat([freqs(seed=1)[0], freqs(seed=2)[0]], 1), (freqs(seed=1)[1], freqs(seed=2)[1])
    t = randn(T, B, H, D)
    per = torch.stack([a[:T] for a in angles], 1).double()[:, :, None]
    assert_rotated(apply_rotary_pos_emb(t, argument), rotate(t, per.cos(), per.sin()), angle_error=1e-6)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("start", "cp"), [(False, (1, 0)), (True, (1, 0)), (False, (3, 1))])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_fused_qkv_rotary_pos_emb(
    tensor_format: str, batch: int, start: bool, cp: tuple[int, int], separate: bool, interleaved: bool
) -> None:
    groups, heads, width = 3, 2, 8
    (q_freqs, q_angles), (k_freqs, k_angles) = freqs(width, interleaved), freqs(width, interleaved, seed=int(separate))
    if not separate:
        k_freqs = q_freqs
    outer = (T, batch) if tensor_format == "sbhd" else (batch, T)
    qkv = randn(*outer, groups, (heads + 2) * D).requires_grad_()
    starts = [3, 1][:batch]

    def statement(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split([heads * D, D, D], -1)
        q = q.reshape(*outer, groups * heads, D)
        rotated = []
        for x, angles in ((q, q_angles), (k, k_angles)):
            cos, sin = table_rows(angles, T, starts if start else [0] * batch, cp)
            if tensor_format == "sbhd":
                cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
            rotated.append(rotate(x, cos, sin, interleaved=interleaved))
        return *rotated, v.double()

    arguments = (q_freqs, k_freqs, [heads * D, D, D], tensor_format, ints(*starts) if start else None, interleaved)
    for x in (qkv, qkv.detach()):
        result = apply_fused_qkv_rotary_pos_emb(x, *arguments, cp_size=cp[0], cp_rank=cp[1])
        for y, expected in zip(result, statement(qkv), strict=True):
            assert y.shape == expected.shape
            assert_rotated(y, expected, angle_error=1e-6)
        assert result[0].is_contiguous() and result[1].is_contiguous()
        assert result[2].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if x.requires_grad:
            assert_gradient(result, x, statement)


def test_q_and_k_of_a_packed_tensor_may_rotate_in_different_widths() -> None:
    (q_freqs, q_angles), (k_freqs, k_angles) = freqs(8, False), freqs(4, False)
    qkv = randn(T, 2, 3, 3 * D).requires_grad_()

    def statement(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split(D, -1)
        turned = []
        for x, angles in ((q, q_angles), (k, k_angles)):
            cos, sin = (y.transpose(0, 1) for y in table_rows(angles, T, [0, 0], (1, 0)))
            turned.append(rotate(x, cos, sin))
        return *turned, v.double()

    result = apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [D, D, D])
    for y, expected in zip(result, statement(qkv), strict=True):
        assert_rotated(y, expected, angle_error=1e-6)
    assert_gradient(result, qkv, statement)


def test_derivatives_of_every_order_and_unused_results() -> None:
    argument = freqs(8)[0].double()
    qkv = randn(3, 1, 1, 24).double().requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return apply_fused_qkv_rotary_pos_emb(x, argument, argument, [8, 8, 8])

    assert torch.autograd.gradcheck(function, qkv)
    assert torch.autograd.gradgradcheck(function, qkv)
    (d,) = torch.autograd.grad(function(qkv)[1].sum(), qkv)
    assert d[..., :8].abs().max() == 0 and d[..., 16:].abs().max() == 0 and d[..., 8:16].abs().min() > 0
    (d,) = torch.autograd.grad(function(qkv)[0].sgn().sum(), qkv)  # a ZeroTensor gradient
    assert d.shape == qkv.shape and not d.any()


@pytest.mark.parametrize(
    ("tokens", "batch", "groups", "widths"),
    [(0, 2, 3, (16, 8, 8)), (3, 0, 2, (8, 8, 8)), (3, 2, 0, (8, 8, 8)), (3, 2, 2, (0, 8, 8)), (3, 2, 2, (16, 8, 0))],
)
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_a_packed_form_without_elements(
    tokens: int, batch: int, groups: int, widths: tuple[int, int, int], tensor_format: str
) -> None:
    outer = (tokens, batch) if tensor_format == "sbhd" else (batch, tokens)
    qkv = randn(*outer, groups, sum(widths)).requires_grad_()
    with torch.no_grad():
        inference = apply_fused_qkv_rotary_pos_emb(qkv, freqs(8)[0], freqs(8)[0], list(widths), tensor_format)
    training = apply_fused_qkv_rotary_pos_emb(qkv, freqs(8)[0], freqs(8)[0], list(widths), tensor_format)
    expected = [(*outer, groups * widths[0] // 8, 8), (*outer, groups, 8), (*outer, groups, widths[2])]
    for result in (inference, training):
        assert [tuple(y.shape) for y in result] == expected
    for create_graph in (False, True):
        (d,) = torch.autograd.grad(
            [y.square().sum() for y in training], qkv, retain_graph=True, create_graph=create_graph
        )
        torch.testing.assert_close(d, 2 * qkv)  # a rotation preserves norms
    assert d.requires_grad


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_packed_form_in_a_checkpoint(separate: bool, use_reentrant: bool) -> None:
    """A checkpoint without reentry lets backward unpack what was saved only once."""
    x, table = randn(T, B, 2, 4 * D).requires_grad_(), freqs()[0]
    start = ints(3, 0)

    def total(x: Tensor) -> Tensor:
        of_k = table.clone() if separate else table
        return sum(
            y.square().sum() for y in apply_fused_qkv_rotary_pos_emb(x, table, of_k, [2 * D, D, D], "sbhd", start)
        )

    (expected,) = torch.autograd.grad(total(x), x)
    torch.utils.checkpoint.checkpoint(total, x, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_hook_may_bring_back_the_angles_of_the_packed_form_in_another_dtype() -> None:
    x, table = randn(T, B, 2, 4 * D).requires_grad_(), freqs()[0]

    def total() -> Tensor:
        rotated = apply_fused_qkv_rotary_pos_emb(x, table, table, [2 * D, D, D], "sbhd", ints(3, 0))
        return sum(y.square().sum() for y in rotated)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, Tensor.double):
        y = total()
    torch.testing.assert_close(torch.autograd.grad(y, x), torch.autograd.grad(total(), x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("separate", [False, True])
def test_transforms_of_the_packed_form(tensor_format: str, separate: bool) -> None:
    q_freqs, _ = freqs(8)
    k_freqs = freqs(8, seed=1)[0] if separate else q_freqs
    shape = (T, B, 3, 32) if tensor_format == "sbhd" else (B, T, 3, 32)
    assert_transforms(
        lambda x: apply_fused_qkv_rotary_pos_emb(x, q_freqs, k_freqs, [16, 8, 8], tensor_format), randn(*shape)
    )


def test_one_launch_and_nothing_else() -> None:
    argument, _ = freqs()
    other, _ = freqs(seed=1)
    t, qkv = randn(T, B, H, D), randn(T, B, 3, 4 * D)
    split = [2 * D, D, D]
    assert launches(apply_rotary_pos_emb, t, argument) == {"fusewise::rope": 1}
    assert launches(apply_rotary_pos_emb, t.transpose(1, 2), argument) == {"fusewise::rope": 1}
    assert launches(apply_fused_qkv_rotary_pos_emb, qkv, argument, argument, split) == {"fusewise::rope_qk": 1}
    assert launches(apply_fused_qkv_rotary_pos_emb, qkv, argument, other, split) == {"fusewise::rope": 2}
    outputs = apply_fused_qkv_rotary_pos_emb(qkv.requires_grad_(), argument, argument, split)
    g = [torch.randn(y.shape, device=DEVICE) for y in outputs]
    assert launches(torch.autograd.grad, outputs, qkv, g) == {
        "fusewise::rope_qk_out": 1,
        "aten::copy_": 1,
    }  # the copy: v


# Dynamo instantiates every autograd.Function it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(grad: bool) -> None:
    torch._dynamo.reset()
    argument, _ = freqs()

    def function(t: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        each = apply_fused_qkv_rotary_pos_emb(qkv, argument, argument, [D, D, D])
        return apply_rotary_pos_emb(t, argument), apply_rotary_pos_emb(t.transpose(1, 2), argument), *each

    inputs = [randn(T, B, H, D).requires_grad_(grad), randn(T, B, H, 3 * D).requires_grad_(grad)]
    eager, compiled = function(*inputs), torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    if grad:
        g = [torch.randn_like(y) for y in eager]
        for a, b in zip(torch.autograd.grad(compiled, inputs, g), torch.autograd.grad(eager, inputs, g), strict=True):
            torch.testing.assert_close(a, b)


def test_start_positions_of_any_strides() -> None:
    t, starts = randn(T, 2, H, D), ints(1, 9, 2, 9)[::2]
    f = randn(64, 1, 1, D)
    found = apply_rotary_pos_emb(t, f, start_positions=starts)
    torch.testing.assert_close(found, apply_rotary_pos_emb(t, f, start_positions=starts.clone()))


@pytest.mark.parametrize(("factor", "trained", "scale"), [(None, None, 1.0), (4, 8, 0.25), (2, 4, 4 / 10)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_position_embedding(factor: Any, trained: Any, scale: float, interleaved: bool) -> None:
    module = RotaryPositionEmbedding(16, 0.5, factor, trained, rotary_base=500.0, interleaved=interleaved)
    assert list(module.state_dict()) == ["inv_freq"]
    with torch.autocast(DEVICE, torch.bfloat16):
        angles = module(10, offset=3)
    p, i = torch.arange(10, device=DEVICE).double() + 3, torch.arange(4, device=DEVICE).double()
    expected = scale * p[:, None] * 500.0 ** (-2 * i / 8)
    expected = expected.repeat_interleave(2, -1) if interleaved else torch.cat((expected, expected), -1)
    assert angles.dtype == torch.float32 and angles.shape == (10, 1, 1, 8)
    torch.testing.assert_close(angles[:, 0, 0].double(), expected, rtol=1e-6, atol=1e-6)
    for cast in (torch.nn.Module.half, lambda m: m.to(DEVICE, torch.bfloat16)):
        assert torch.equal(cast(torch.nn.Sequential(module))[0](10, offset=3), angles)
    assert module.double()(10, offset=3).dtype == torch.float64 and list(module.state_dict()) == ["inv_freq"]
    assert torch.equal(module.float()(10, offset=3), angles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_cuda", [False, True])
def test_rotary_position_embedding_made_on_the_meta_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_cuda: bool
) -> None:
    expected = RotaryPositionEmbedding(D, 0.5, rotary_base=500.0).inv_freq
    monkeypatch.setattr(torch.cuda, "is_available", lambda: with_cuda)
    with torch.device("meta"):
        module = RotaryPositionEmbedding(D, 0.5, rotary_base=500.0)
    assert module.inv_freq.is_meta
    found = module.to(dtype).to_empty(device=DEVICE).inv_freq
    torch.testing.assert_close(found, expected.double() if dtype == torch.float64 else expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda f: apply_rotary_pos_emb(randn(T, B, H, D), f, "bhsd"),
            "tensor_format must be one of sbhd, bshd, thd, got 'bhsd'",
        ),
        (lambda f: apply_rotary_pos_emb(randn(T, H, D), f, "thd"), "cu_seqlens must be given for thd"),
        (lambda f: apply_rotary_pos_emb(randn(T, B, H, D), f[:, 0, 0]), "freqs must have shape (R, 1, 1, rotary_dim)"),
        (lambda f: apply_rotary_pos_emb(randn(99, B, H, D), f), "freqs must have a row for each of 99 positions, got"),
        (
            lambda f: apply_rotary_pos_emb(randn(9, B, H, D), f, cp_size=11),
            "freqs must have a row for each of 99 positions, got",
        ),
        (lambda f: apply_fused_qkv_rotary_pos_emb(randn(T, B, 2, 48), f, f, [16, 16, 8]), "qkv_split_arg_list must be"),
        (lambda f: apply_fused_qkv_rotary_pos_emb(randn(T, B, 2, 48), f, f, [24, 16, 8]), "qkv_split_arg_list must be"),
        (
            lambda f: apply_fused_qkv_rotary_pos_emb(randn(T, B, 2, 48), f, f, [16] * 3, "thd"),
            "tensor_format must be sbhd or",
        ),
        (
            lambda f: apply_fused_qkv_rotary_pos_emb(
                randn(T, B, 2, 48), f, f, [16] * 3, start_positions=ints(0, 0), cp_size=2
            ),
            "start_positions must be None with cp_size > 1",
        ),
        (
            lambda f: SwiGLU(glu_interleave_size=3)(randn(2, 8)),
            "input must be whole blocks of 2 · glu_interleave_size = 6",
        ),
        (lambda f: SwiGLU(glu_interleave_size=0), "glu_interleave_size must be at least 1, got 0"),
        (
            lambda f: apply_fused_qkv_rotary_pos_emb(randn(B, T, 2, 48).transpose(0, 1), f, f, [16] * 3),
            "qkv must be contiguous",
        ),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r", got .*; ") as raised:
        call(freqs()[0])
    assert message in str(raised.value)


def test_split_results_may_be_modified_in_place_in_training() -> None:
    """q and k may; v is a view of qkv."""
    freqs, leaf = RotaryPositionEmbedding(8)(16), torch.randn(4, 2, 3, 32, requires_grad=True)
    gradients = []
    for in_place in (True, False):
        q, k, v = apply_fused_qkv_rotary_pos_emb(leaf * 1, freqs, freqs, [16, 8, 8])
        q, k = (q.mul_(2), k.add_(1)) if in_place else (q * 2, k + 1)
        gradients += torch.autograd.grad((q.square().sum() + k.square().sum() + v.sum()), leaf)
    assert torch.equal(*gradients)


def test_inference_mode_records_nothing_even_with_gradients_enabled() -> None:
    qkv, angles = randn(8, 2, 4, 3 * D).requires_grad_(), freqs()[0]
    expected = apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [D, D, D])
    with torch.inference_mode(), torch.enable_grad():
        q, k, _ = apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [D, D, D])  # v is a view, as in eager code
        assert not q.requires_grad and not k.requires_grad
        for y, true in zip((q, k), expected, strict=False):
            torch.testing.assert_close(y, true.detach())
