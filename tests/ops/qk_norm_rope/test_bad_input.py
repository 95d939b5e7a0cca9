"""Every invalid argument has one error: its type, and `qk_norm_rope: <argument> must <contract>, got <value>; <one fix>`."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

import fusewise
from fusewise.ops.qk_norm_rope import _native
from fusewise.ops.qk_norm_rope._problem import Norm
from fusewise.ops.rope._problem import Spec

from ..rope.support import make_table

Q, K = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16)
W = torch.randn(16)
TABLE = make_table("half", 8, 2, torch.float32)
FORM = re.compile(r"qk_norm_rope: [\w ]+? must .+, got .+; .+", re.DOTALL)

# The arguments (in addition to q, k, their weights and the table), the error type, and the expected message.
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # the weights
    "weight-list": ({"q_weight": [1.0] * 16}, TypeError, "q_weight must be a torch.Tensor, got list; pass a tensor for q_weight"),
    "k-weight-number": ({"k_weight": 1.0}, TypeError, "k_weight must be a torch.Tensor, got float"),
    "weight-integer": ({"q_weight": W.int()}, TypeError, "q_weight must have dtype float32, bfloat16, float16 or float64, got int32"),
    "weight-float64": ({"k_weight": W.double()}, TypeError, "k_weight must have dtype float32, bfloat16 or float16 for such a q, got float64"),
    "weight-device": ({"q_weight": W.to("meta")}, ValueError, "q_weight must be on the device of q, cpu, got meta"),
    "weight-negated": ({"q_weight": torch._neg_view(W)}, ValueError, "q_weight must not be a lazily negated view"),
    "weight-sparse": ({"q_weight": W.to_sparse()}, TypeError, "q_weight must be a strided tensor, got torch.sparse_coo"),
    "weight-shape": ({"q_weight": W[:8]}, ValueError, r'q_weight must be contiguous, of shape \(head_dim,\) = \(16,\) for norm="head", got shape \(8,\)'),
    "weight-2d": ({"q_weight": W[None]}, ValueError, r"q_weight must be contiguous, of shape \(head_dim,\) = \(16,\).*got shape \(1, 16\)"),
    "weight-strides": ({"q_weight": torch.randn(32)[::2]}, ValueError, r"q_weight must be contiguous.*with strides \(2,\)"),
    "weight-all": ({"norm": "all"}, ValueError, r'q_weight must be contiguous, of shape \(heads · head_dim,\) = \(64,\) for norm="all", got shape \(16,\)'),
    "k-weight-all": ({"norm": "all", "q_weight": torch.randn(64)}, ValueError, r"k_weight must be contiguous, of shape \(heads · head_dim,\) = \(32,\)"),
    "no-k-weight": ({"k_weight": None}, ValueError, "k_weight must be given where the other weight is, got None; pass both weights or none"),
    "no-q-weight": ({"q_weight": None}, ValueError, "q_weight must be given where the other weight is, got None"),
    "k-weight-alone": ({"k": None}, ValueError, "k_weight must be None where there is no k, got a tensor"),
    # the norm
    "norm": ({"norm": "token"}, ValueError, "norm must be one of head, all, got 'token'"),
    "norm-None": ({"norm": None}, ValueError, "norm must be one of head, all, got None"),
    "eps-negative": ({"eps": -1e-6}, ValueError, "eps must be at least 0, got -1e-06"),
    "eps-nan": ({"eps": float("nan")}, ValueError, "eps must be a float or an int, finite in float32, got nan"),
    "eps-text": ({"eps": "1e-6"}, TypeError, "eps must be a float or an int, finite in float32, got '1e-6'"),
    "eps-bool": ({"eps": True}, TypeError, "eps must be a float or an int, finite in float32, got True"),
    "eps-tensor": ({"eps": torch.tensor(1e-6)}, TypeError, "eps must be a float or an int"),
    "eps-double": ({"eps": 1e300}, ValueError, r"eps must be a float or an int, finite in float32, got 1e\+300"),
    "offset-int": ({"weight_offset": 10**40}, ValueError, "weight_offset must be a float or an int, finite in float32, got 1000"),
    "offset-inf": ({"weight_offset": float("inf")}, ValueError, "weight_offset must be a float or an int, finite in float32, got inf"),
    "offset-None": ({"weight_offset": None}, TypeError, "weight_offset must be a float or an int, finite in float32, got None"),
    "wide": ({"q": torch.empty(1, 1, 200, 512), "k": None, "k_weight": None, "norm": "all", **make_table("half", 256, 1, torch.float32)},
             ValueError, r'q must have at most 65536 features a token for norm="all", got \(1, 1, 200, 512\)'),
    # checks shared with RoPE, under this name
    "q-list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q-integer": ({"q": Q.int()}, TypeError, "q must have dtype float32, bfloat16, float16 or float64, got int32"),
    "q-strides": ({"q": Q.mT.contiguous().mT}, ValueError, r"q must have a contiguous last dimension \(stride 1\)"),
    "k-dtype": ({"k": K.bfloat16()}, TypeError, "k must have the dtype of q, float32, got bfloat16"),
    "k-tokens": ({"k": K[:, :5]}, ValueError, r"k must have as many tokens as q \(6\)"),
    "layout": ({"layout": "bsdh"}, ValueError, "layout must be one of bshd, sbhd, bhsd, thd, got 'bsdh'"),
    "no-table": ({"cos": None, "sin": None}, ValueError, "the table must be exactly one of cos and sin, cos_sin, angles, inv_freq"),
    "no-sin": ({"sin": None}, ValueError, "the table must be exactly one of"),
    "table-short": ({"offset": 59}, ValueError, "the table must have a row for each of the positions up to 64, got 64 rows"),
    "rotary_dim": ({"rotary_dim": 18}, ValueError, "rotary_dim must be even and from 2 to head_dim = 16, got 18"),
    "table-grad": ({"cos": TABLE["cos"].clone().requires_grad_()}, ValueError, "cos must not require grad: no gradient of the table is computed"),
    "table-device": ({name: x.to("meta") for name, x in TABLE.items()}, ValueError, "sin must be on the device of q, cpu, got meta"),
    "table-negated": ({name: torch._neg_view(x) for name, x in TABLE.items()}, ValueError, "sin must not be a lazily negated view"),
    "positions": ({"positions": torch.zeros(6)}, TypeError, "positions must have dtype int32 or int64, got float32"),
    # the rest
    "impl": ({"impl": "cpu"}, ValueError, "impl must be one of auto, triton, cuda, reference, got 'cpu'"),
    "impl-device": ({"impl": "triton"}, ValueError, "impl must be able to serve the tensors, got 'triton': .*; use impl=\"auto\""),
    "norm-array": ({"norm": numpy.array(["head", "all"])}, ValueError, r"norm must be one of .*, got array\("),
    "offset-array": ({"offset": numpy.array([1, 2])}, TypeError, r"offset must be an int or an integer tensor, got array\("),
    "impl-array": ({"impl": numpy.array(["auto", "triton"])}, ValueError, r"impl must be one of .*, got array\("),
    "impl-None": ({"impl": None}, ValueError, "impl must be one of auto"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    changes, error, words = MISTAKES[name]
    right = {"q": Q, "k": K, "q_weight": W, "k_weight": W, **TABLE}
    fusewise.qk_norm_rope(**right)  # cached as valid, which the other call must not be, even if it fails twice
    arguments = {**right, **changes}
    for _ in range(2):
        with pytest.raises(error, match=f"^qk_norm_rope: {words}") as caught:
            fusewise.qk_norm_rope(**arguments)
        assert type(caught.value) is error
        assert FORM.fullmatch(str(caught.value)), str(caught.value)


def test_a_call_that_passed_does_not_let_a_wrong_one_pass() -> None:
    """Validation is cached by everything it checks: each of these calls differs in one respect from an earlier one."""
    fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=1, weight_offset=0)
    with pytest.raises(TypeError, match="eps must be a float or an int, finite in float32, got True"):
        fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=True, weight_offset=0)
    with pytest.raises(TypeError, match="weight_offset must be a float or an int, finite in float32, got False"):
        fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=1, weight_offset=False)
    with pytest.raises(TypeError, match="rotary_start must be an int, got False"):
        fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=1, weight_offset=0, rotary_start=False)  # equals the default
    with pytest.raises(ValueError, match="k_weight must be contiguous"):
        fusewise.qk_norm_rope(Q, K, W, torch.randn(32)[::2], **TABLE, eps=1, weight_offset=0)
    fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=1, weight_offset=0, offset=58)
    for offset, message in ((59, "positions up to 64"), (-1, "offset must be >= 0"), (True, "offset must be an int")):
        with pytest.raises((ValueError, TypeError), match=message):
            fusewise.qk_norm_rope(Q, K, W, W, **TABLE, eps=1, weight_offset=0, offset=offset)
    positions = torch.zeros(1, dtype=torch.int64).expand(6)  # the strides that a sparse tensor reports
    fusewise.qk_norm_rope(Q, K, W, W, **TABLE, positions=positions)
    with pytest.raises(TypeError, match="positions must be a strided tensor"):
        fusewise.qk_norm_rope(Q, K, W, W, **TABLE, positions=positions.to_sparse())


def test_the_operator_itself_refuses_too() -> None:
    """A compiled graph may run in another environment than its trace."""
    rotation = (*TABLE.values(), None, None, None, 0, "")
    with pytest.raises(ValueError, match=r"qk_norm_rope: impl must be able to serve the tensors, got 'triton'"):
        torch.ops.fusewise.qk_norm_rope([Q], [W], *rotation, 1e-6, 0.0, "head", "triton")


ROTATION = (*TABLE.values(), None, None, None, 0, Spec(rotary_dim=16).encode())
STRIDED = torch.randn(32)[::2]
STRIDES = re.escape(
    "qk_norm_rope: a weight must have a contiguous last dimension (stride 1), got strides (2,); call .contiguous()"
)


def test_weights_of_an_exported_program_are_checked_again_for_native_code() -> None:
    """It may get others than it was traced with, and kernels know no strides of weights."""
    with pytest.raises(ValueError, match=STRIDES):
        _native.planned((Q,), (torch.empty_like(Q),), [STRIDED], ROTATION, Norm(1e-6, 0.0, "head"))


@pytest.mark.interpreter
def test_weights_of_an_exported_program_are_checked_again_for_triton() -> None:
    with pytest.raises(ValueError, match=STRIDES):
        torch.ops.fusewise.qk_norm_rope([Q], [STRIDED], *ROTATION, 1e-6, 0.0, "head", "triton")


def test_explain_dispatch() -> None:
    told = fusewise.explain_dispatch(fusewise.qk_norm_rope, Q, K, W, W, **TABLE)
    assert (told.op, told.impl) == ("qk_norm_rope", "reference")
    assert "TRITON_INTERPRET" in told.passed_over["triton"]


@pytest.mark.gpu
def test_a_gpu_takes_the_kernel() -> None:
    told = fusewise.explain_dispatch(fusewise.qk_norm_rope, Q.cuda(), K.cuda(), W.cuda(), W.cuda())
    assert told.impl in ("cuda", "triton")  # CUDA once it is built
