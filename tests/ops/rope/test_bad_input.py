"""Every invalid argument has one error: its type, and `<op>: <argument> must <contract>, got <value>; <one fix>`."""

from __future__ import annotations

import enum
import re
from typing import Any

import numpy
import pytest
import torch

import fusewise

from .support import make_table

Q = torch.randn(2, 6, 4, 16)
K = torch.randn(2, 6, 2, 16)
THD = torch.randn(7, 2, 16)
TABLE = make_table("half", 8, 2, torch.float32)
COS, SIN = TABLE["cos"], TABLE["sin"]
FREQ = make_table("inv_freq", 8, 2, torch.float32)["inv_freq"]
CU = torch.tensor([0, 3, 7])
IDS = torch.arange(6)
FORM = re.compile(r"(rope_?): [\w ]+? (must|must not) .+, got .+; .+", re.DOTALL)


def sparse() -> torch.Tensor:
    return torch.zeros(2, 6, 4, 16).to_sparse()


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# The arguments (in addition to q, k, cos and sin; None removes one), the error type, and the expected message.
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # q and k
    "q-list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "k-list": ({"k": [1.0]}, TypeError, "k must be a torch.Tensor, got list"),
    "q-integer": ({"q": Q.int()}, TypeError, "q must have dtype float32, bfloat16, float16 or float64, got int32"),
    "q-complex": ({"q": torch.zeros(2, 6, 4, 16, dtype=torch.complex64), "k": None}, TypeError, r"q must have dtype .*, got complex64; call torch.view_as_real\(q\)"),
    "k-integer": ({"k": K.long()}, TypeError, "k must have dtype .*, got int64"),
    "q-bool": ({"q": Q > 0}, TypeError, "q must have dtype .*, got bool"),
    "q-sparse": ({"q": sparse()}, TypeError, "q must be a strided tensor, got torch.sparse_coo"),
    "q-nested": ({"q": torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)}, TypeError, r"q must be a strided tensor, got nested; pass q.values\(\)"),
    "q-negated": ({"q": torch._neg_view(Q)}, ValueError, "q must not be a lazily negated view, as .* is, got one; call .resolve_neg"),
    "q-dimensions": ({"q": THD}, ValueError, r"q must have 4 dimensions in layout bshd, got shape \(7, 2, 16\)"),
    "k-dimensions": ({"k": THD}, ValueError, "k must have 4 dimensions in layout bshd"),
    "thd-dimensions": ({"layout": "thd"}, ValueError, "q must have 3 dimensions in layout thd"),
    "q-strides": ({"q": Q.mT.contiguous().mT}, ValueError, r"q must have a contiguous last dimension \(stride 1\), got strides"),
    "k-strides": ({"k": K.mT.contiguous().mT}, ValueError, "k must have a contiguous last dimension"),
    "head_dim-odd": ({"q": Q[..., :15], "k": None}, ValueError, "q must have an even head_dim from 2 to 512, got 15"),
    "head_dim-large": ({"q": torch.zeros(1, 1, 1, 514), "k": None}, ValueError, "q must have an even head_dim from 2 to 512, got 514"),
    "head_dim-zero": ({"q": torch.zeros(1, 1, 1, 0), "k": None}, ValueError, "q must have an even head_dim from 2 to 512, got 0"),
    "k-head_dim-odd": ({"k": K[..., :9], "rotary_dim": 8}, ValueError, "k must have an even head_dim from 2 to 512, got 9"),
    "k-head_dim": ({"k": K[..., :8]}, ValueError, "k must have the head_dim of q, 16, got 8; pass rotary_dim"),
    "k-narrow": ({"k": K[..., :4], "rotary_dim": 8}, ValueError, "rotary_dim must be even and from 2 to head_dim = 4, got 8"),
    "k-tokens": ({"k": K[:, :5]}, ValueError, r"k must have as many tokens as q \(6\) in layout bshd, got \(2, 5, 2, 16\)"),
    "k-batch": ({"k": K[:1]}, ValueError, r"k must have as many batch entries as q \(2\)"),
    "k-layout": ({"k": K.transpose(1, 2)}, ValueError, r"k must have as many tokens as q \(6\)"),
    "k-dtype": ({"k": K.bfloat16()}, TypeError, "k must have the dtype of q, float32, got bfloat16; call k.to"),
    "k-device": ({"k": K.to("meta")}, ValueError, "k must be on the device of q, cpu, got meta"),
    "layout-tensor": ({"layout": Q}, ValueError, "layout must be one of bshd, sbhd, bhsd, thd, got Tensor; "),
    "layout-long": ({"layout": "bshd" * 99}, ValueError, "layout must be one of bshd, sbhd, bhsd, thd, got 'bshd[bshd]*\\.\\.\\.; "),
    "rotary_dim-array": ({"rotary_dim": numpy.ones((9, 9))}, TypeError, "rotary_dim must be an int, got ndarray; "),
    "layout": ({"layout": "bsdh"}, ValueError, "layout must be one of bshd, sbhd, bhsd, thd, got 'bsdh'"),
    "layout-None": ({"layout": None}, ValueError, "layout must be one of"),
    "layout-array": ({"layout": numpy.array(["bshd", "thd"])}, ValueError, r"layout must be one of .*, got array\("),
    "pairing-array": ({"pairing": numpy.array(["half", "half"])}, ValueError, r"pairing must be one of .*, got array\("),
    "impl-array": ({"impl": numpy.array(["auto", "cpu"])}, ValueError, r"impl must be one of .*, got array\("),
    "offset-array": ({"offset": numpy.array([1, 2])}, TypeError, r"offset must be an int or an integer tensor, got array\("),
    "layout-no-repr": ({"layout": Unprintable()}, ValueError, "layout must be one of .*, got Unprintable; "),
    "layout-object": ({"layout": object()}, ValueError, "layout must be one of .*, got object; "),
    "layout-list": ({"layout": ["bshd"]}, ValueError, "layout must be one of"),
    # pairing and width
    "pairing": ({"pairing": "neox"}, ValueError, "pairing must be one of half, interleaved, interleaved_to_half, half_to_interleaved, got 'neox'"),
    "rotary_dim-odd": ({"rotary_dim": 7}, ValueError, "rotary_dim must be even and from 2 to head_dim = 16, got 7"),
    "rotary_dim-large": ({"rotary_dim": 18}, ValueError, "rotary_dim must be even and from 2 to head_dim = 16, got 18"),
    "rotary_dim-zero": ({"rotary_dim": 0}, ValueError, "rotary_dim must be even and from 2 to head_dim = 16, got 0"),
    "rotary_dim-negative": ({"rotary_dim": -2}, ValueError, "rotary_dim must be even and from 2"),
    "rotary_dim-float": ({"rotary_dim": 8.0}, TypeError, "rotary_dim must be an int, got 8.0"),
    "rotary_dim-bool": ({"rotary_dim": True}, TypeError, "rotary_dim must be an int, got True"),
    "rotary_start-large": ({"rotary_start": 1}, ValueError, "rotary_start must leave room for rotary_dim = 16 of head_dim = 16 features, got 1"),
    "rotary_start-negative": ({"rotary_start": -18}, ValueError, "rotary_start must leave room"),
    "rotary_start-float": ({"rotary_start": 0.0}, TypeError, "rotary_start must be an int, got 0.0"),
    "rotary_start-k": ({"k": K[..., :8], "cos": COS[:, :4], "sin": SIN[:, :4], "rotary_dim": 8, "rotary_start": 4}, ValueError,
                       "rotary_start must leave room for rotary_dim = 8 of head_dim = 8 features, got 4"),
    # the table
    "no-table": ({"cos": None, "sin": None}, ValueError, "the table must be exactly one of cos and sin, cos_sin, angles, inv_freq, got none of them"),
    "no-sin": ({"sin": None}, ValueError, "the table must be exactly one of .*, got cos;"),
    "no-cos": ({"cos": None}, ValueError, "the table must be exactly one of .*, got sin;"),
    "two-tables": ({"inv_freq": FREQ}, ValueError, "the table must be exactly one of .*, got cos and sin and inv_freq"),
    "sin-with-frequencies": ({"cos": None, "inv_freq": FREQ}, ValueError, "the table must be exactly one of .*, got sin and inv_freq"),
    "cos-number": ({"cos": 1.0}, TypeError, "cos must be a torch.Tensor, got float"),
    "sin-number": ({"sin": 1.0}, TypeError, "sin must be a torch.Tensor, got float"),
    "cos-integer": ({"cos": COS.int()}, TypeError, "cos must have dtype float32, bfloat16 or float16, got int32"),
    "angles-complex": ({"cos": None, "sin": None, "angles": torch.complex(COS, SIN)}, TypeError, "angles must have dtype .*, got complex64; pass cos=angles.real, sin=angles.imag"),
    "cos-complex": ({"cos": COS.to(torch.complex64)}, TypeError, "cos must have dtype .*, got complex64"),
    "table-float64": ({"cos": COS.double(), "sin": SIN.double()}, TypeError, "must have dtype float32, bfloat16 or float16, got float64"),
    "cos-sparse": ({"cos": COS.to_sparse()}, TypeError, "cos must be a strided tensor, got torch.sparse_coo"),
    "cos-mkldnn": ({"cos": COS.to_mkldnn()}, TypeError, "cos must be a strided tensor, got torch._mkldnn"),
    "sin-negated": ({"sin": torch.complex(COS, SIN).conj().imag, "cos": torch.complex(COS, SIN).real}, ValueError,
                    "sin must not be a lazily negated view"),
    "inv_freq-sparse": ({"cos": None, "sin": None, "inv_freq": FREQ.to_sparse()}, TypeError, "inv_freq must be a strided tensor"),
    "sin-dtype": ({"sin": SIN.bfloat16()}, TypeError, "sin must have the dtype of cos, float32, got bfloat16"),
    "cos-device": ({"cos": COS.to("meta"), "sin": SIN.to("meta")}, ValueError, "must be on the device of q, cpu, got meta"),
    "cos-width": ({"cos": COS[:, :7], "sin": SIN[:, :7]}, ValueError, r"cos must have shape \(R, P\) .* with P = 8 \(or 2P = 16 duplicated\) and B = 2, got \(64, 7\)"),
    "cos-width-partial": ({"cos": COS[:, :4], "sin": SIN[:, :4]}, ValueError, "cos must have shape .*, got .*; .*and rotary_dim if only a part"),
    "cos-dimensions": ({"cos": COS[0], "sin": SIN[0]}, ValueError, r"cos must have shape .*, got \(8,\); reshape it"),
    "cos-heads": ({"cos": COS[None, None], "sin": SIN[None, None]}, ValueError, r"cos must have shape .*, got \(1, 1, 64, 8\); reshape it, without a dimension for the heads"),
    "cos-batch": ({"cos": COS.expand(3, 64, 8), "sin": SIN.expand(3, 64, 8)}, ValueError, r"cos must have shape .*, got \(3, 64, 8\); pass one table for all sequences, or one for each"),
    "sin-shape": ({"sin": SIN[:32]}, ValueError, r"sin must have the shape of cos, \(64, 8\), got \(32, 8\)"),
    "sin-strides": ({"sin": SIN.mT.contiguous().mT}, ValueError, "sin must have the strides of cos"),
    "cos_sin-width": ({"cos": None, "sin": None, "cos_sin": COS}, ValueError, r"cos_sin must have shape \(R, 2P\).*2P = 16, B = 2, got \(64, 8\)"),
    "angles-width": ({"cos": None, "sin": None, "angles": COS[:, :3]}, ValueError, r"angles must have shape .*, got \(64, 3\)"),
    "inv_freq-shape": ({"cos": None, "sin": None, "inv_freq": FREQ[:7]}, ValueError, r"inv_freq must have shape \(P,\) = \(8,\), got \(7,\)"),
    "inv_freq-2d": ({"cos": None, "sin": None, "inv_freq": FREQ[None]}, ValueError, r"inv_freq must have shape \(P,\) = \(8,\), got \(1, 8\)"),
    "table-short": ({"cos": COS[:5], "sin": SIN[:5]}, ValueError, "the table must have a row for each of the positions up to 5, got 5 rows"),
    "table-empty": ({"cos": COS[:0], "sin": SIN[:0]}, ValueError, "the table must have a row for each of the positions up to 5, got 0 rows"),
    "table-short-offset": ({"offset": 59}, ValueError, "the table must have a row for each of the positions up to 64, got 64 rows"),
    "table-short-ranks": ({"context_parallel": (0, 16)}, ValueError, "the table must have a row for each of the positions up to 95, got 64 rows"),
    "cos-requires-grad": ({"cos": COS.clone().requires_grad_()}, ValueError, "cos must not require grad"),
    "scale-table": ({"scale": 2.0}, ValueError, "scale must be 1.0 with a cos and sin table, got 2.0"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be a float or an int, finite in float32, got nan"),
    "scale-inf": ({"scale": float("inf")}, ValueError, "scale must be a float or an int, finite in float32, got inf"),
    "scale-numpy": ({"scale": numpy.float32(2)}, TypeError, "scale must be a float or an int, finite in float32, got "),
    "scale-text": ({"scale": "1"}, TypeError, "scale must be a float or an int, finite in float32, got '1'"),
    "scale-tensor": ({"scale": torch.ones(())}, TypeError, "scale must be a float or an int"),
    "scale-huge": ({"scale": 10**400}, ValueError, "scale must be a float or an int, finite in float32, got 1000"),
    "scale-beyond-float32": ({"scale": 1e39}, ValueError, "scale must be a float or an int, finite in float32, got 1e\\+39"),
    "inverse-text": ({"inverse": "yes"}, TypeError, "inverse must be a bool, got 'yes'"),
    # positions
    "positions-sparse": ({"positions": IDS.to_sparse()}, TypeError, "positions must be a strided tensor, got torch.sparse_coo"),
    "offset-2^31": ({"cos": None, "sin": None, "inv_freq": FREQ, "offset": 2**31}, ValueError, "offset must be a position below 2\\^31, got 2147483648"),
    "offset-2^70": ({"cos": None, "sin": None, "inv_freq": FREQ, "offset": -(2**70)}, ValueError, "offset must be a position below 2\\^31, got -1180"),
    "positions-list": ({"positions": [0] * 6}, TypeError, "positions must be a torch.Tensor, got list"),
    "positions-float": ({"positions": IDS.float()}, TypeError, "positions must have dtype int32 or int64, got float32"),
    "positions-int16": ({"positions": IDS.short()}, TypeError, "positions must have dtype int32 or int64, got int16"),
    "positions-shape": ({"positions": IDS[:5]}, ValueError, r"positions must have shape \(6,\) or \(2, 6\), got \(5,\)"),
    "positions-TB": ({"positions": torch.zeros(6, 2, dtype=torch.int64)}, ValueError, r"positions must have shape \(6,\) or \(2, 6\), got \(6, 2\)"),
    "positions-device": ({"positions": IDS.to("meta")}, ValueError, "positions must be on the device of q, cpu, got meta"),
    "offset-reach": ({"cos": None, "sin": None, "inv_freq": FREQ, "offset": 2**31 - 5}, ValueError,
                     "offset must leave the 6 positions from it on below 2\\^31, got 2147483643; pass the first position"),
    "offset-reach-packed": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": CU, "cos": None, "sin": None, "inv_freq": FREQ, "offset": 2**31 - 6},
                            ValueError, "offset must leave the 7 positions from it on below 2\\^31"),
    "positions-offset": ({"positions": IDS, "offset": 1}, ValueError, "positions must be None when offset is given"),
    "positions-offsets": ({"positions": IDS, "offset": torch.tensor([0, 1])}, ValueError, "positions must be None when offset is given"),
    "positions-ranks": ({"positions": IDS, "context_parallel": (0, 2)}, ValueError, "positions must be None when context_parallel is given"),
    "offset-float": ({"offset": 1.0}, TypeError, "offset must be an int or an integer tensor, got 1.0"),
    "offset-bool": ({"offset": True}, TypeError, "offset must be an int or an integer tensor, got True"),
    "offset-None": ({"offset": None}, TypeError, "offset must be an int or an integer tensor, got None"),
    "offset-negative": ({"offset": -1}, ValueError, "offset must be >= 0 with a table, got -1"),
    "offset-dtype": ({"offset": torch.zeros(2)}, TypeError, "offset must have dtype int32 or int64, got float32"),
    "offset-shape": ({"offset": torch.zeros(3, dtype=torch.int64)}, ValueError, r"offset must be an int or have shape \(2,\), one a sequence, got \(3,\)"),
    "offset-scalar-tensor": ({"offset": torch.tensor(3)}, ValueError, r"offset must be an int or have shape \(2,\), one a sequence, got \(\)"),
    "cu_seqlens-layout": ({"cu_seqlens": CU}, ValueError, "cu_seqlens must come with layout thd, got layout bshd"),
    "cu_seqlens-list": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": [0, 7]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    "cu_seqlens-dtype": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": CU.float()}, TypeError, "cu_seqlens must have dtype int32 or int64"),
    "cu_seqlens-shape": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": CU[None]}, ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\), got \(1, 3\)"),
    "cu_seqlens-empty": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": CU[:0]}, ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\), got \(0,\)"),
    "cu_seqlens-offset": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": CU, "offset": torch.zeros(3, dtype=torch.int64)}, ValueError,
                          r"offset must be an int or have shape \(2,\)"),
    "offset-strides": ({"offset": torch.tensor([3, 9, 5])[::2]}, ValueError, r"offset must be contiguous, got strides \(2,\); call .contiguous"),
    "offset-expanded": ({"offset": torch.tensor([3]).expand(2)}, ValueError, r"offset must be contiguous, got strides \(0,\)"),
    "cu_seqlens-strides": ({"q": THD, "k": None, "layout": "thd", "cu_seqlens": torch.tensor([0, 9, 7])[::2]}, ValueError, "cu_seqlens must be contiguous"),
    "sections-alone": ({"sections": (4, 2, 2)}, ValueError, "sections must come with positions of shape"),
    "sections-sum": ({"sections": (4, 2, 1), "positions": IDS.expand(3, 6)}, ValueError, r"sections must be three numbers of pairs .* rotary_dim / 2 = 8, got \(4, 2, 1\)"),
    "sections-two": ({"sections": (4, 4), "positions": IDS.expand(3, 6)}, ValueError, "sections must be three numbers of pairs"),
    "sections-negative": ({"sections": (10, -2, 0), "positions": IDS.expand(3, 6)}, ValueError, "sections must be three numbers of pairs"),
    "sections-positions": ({"sections": (4, 2, 2), "positions": IDS}, ValueError, r"positions must have shape \(3, 6\) or \(3, 2, 6\), got \(6,\)"),
    "sections_interleaved-alone": ({"sections_interleaved": True}, ValueError, "sections_interleaved must come with sections"),
    "context_parallel-rank": ({"context_parallel": (2, 2)}, ValueError, r"context_parallel must be \(rank, size\) with 0 <= rank < size, got \(2, 2\)"),
    "sections_interleaved-tensor": ({"sections_interleaved": torch.ones(2)}, TypeError, "sections_interleaved must be a bool, got Tensor; "),
    "context_parallel-2^70": ({"context_parallel": (0, 2**70)}, ValueError, "context_parallel must be"),
    "context_parallel-negative": ({"context_parallel": (-1, 2)}, ValueError, "context_parallel must be"),
    "context_parallel-int": ({"context_parallel": 2}, ValueError, r"context_parallel must be \(rank, size\)"),
    "context_parallel-odd": ({"q": Q[:, :5], "k": None, "context_parallel": (0, 2)}, ValueError,
                             "context_parallel must cut every rank's tokens into two equal chunks, got 5 tokens"),
    # the rest
    "impl": ({"impl": "vulkan"}, ValueError, "impl must be one of auto, .*, got 'vulkan'"),
    "impl-None": ({"impl": None}, ValueError, "impl must be one of auto"),
    "impl-float64": ({"q": Q.double(), "k": None, "impl": "cpu"}, ValueError, "impl must be able to serve the tensors, got 'cpu': .*float64"),
    "impl-device": ({"impl": "triton"}, ValueError, "impl must be able to serve the tensors, got 'triton': .*; use impl=\"auto\""),
}  # fmt: skip


@pytest.mark.parametrize("op", [fusewise.rope, fusewise.rope_], ids=["rope", "rope_"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, op: Any) -> None:
    changes, error, words = MISTAKES[name]
    arguments = {"q": Q, "k": K, **TABLE, **changes}
    before = Q.clone(), K.clone()
    for _ in range(2):  # a failed call must not be cached as valid
        with pytest.raises(error, match=words) as caught:
            op(**arguments)
        assert type(caught.value) is error
        text = str(caught.value)
        assert FORM.fullmatch(text), text
        assert text.startswith(f"{op.__name__}: ")
        assert text.count(";") >= 1
    assert torch.equal(Q, before[0])
    assert torch.equal(K, before[1])


OUTPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "one-for-two": (torch.empty_like(Q), TypeError, r"out must be 2 tensor\(s\), got 'Tensor'"),
    "no-tensor": (3, TypeError, r"out must be 2 tensor\(s\), got 'int'"),
    "list-of-three": ([torch.empty_like(Q)] * 3, TypeError, r"out must be 2 tensor\(s\), got 'list'"),
    "no-tensors": ((1, 2), TypeError, r"out must be 2 tensor\(s\)"),
    "shape": ((torch.empty_like(Q), torch.empty_like(Q)), ValueError, r"out for k must have the shape of k, \(2, 6, 2, 16\), got \(2, 6, 4, 16\); use torch.empty_like\(k\)"),
    "dtype": ((torch.empty_like(Q).bfloat16(), torch.empty_like(K)), TypeError, r"out for q must have dtype float32, got bfloat16; use torch.empty_like\(q\)"),
    "device": ((torch.empty_like(Q, device="meta"), torch.empty_like(K)), ValueError, r"out for q must be on the device of q, cpu, got meta; use torch.empty_like\(q\)"),
    "strides": ((torch.empty_like(Q).mT.contiguous().mT, torch.empty_like(K)), ValueError, r"out for q must have a contiguous last dimension .*; use torch.empty_like\(q\)"),
    "negated": ((torch._neg_view(torch.empty_like(Q)), torch.empty_like(K)), ValueError, r"out for q must not be a lazily negated view, .*; use torch.empty_like\(q\)"),
    "sparse": ((torch.empty_like(Q), sparse()), TypeError, r"out for k must be a strided tensor, got torch.sparse_coo; use torch.empty_like\(k\)"),
    "requires-grad": ((torch.empty_like(Q), torch.empty_like(K).requires_grad_()), ValueError, "out for k must not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_wrong_outputs(name: str) -> None:
    out, error, words = OUTPUTS[name]
    with pytest.raises(error, match=f"^rope: {words}") as caught:
        fusewise.rope(Q, K, **TABLE, out=out)
    assert type(caught.value) is error
    assert FORM.fullmatch(str(caught.value)), str(caught.value)


def test_a_call_that_passed_does_not_let_a_wrong_one_pass() -> None:
    """Validation is cached by everything it checks: each of these calls differs in one respect from an earlier one."""
    fusewise.rope(Q, K, **TABLE, offset=58)
    with pytest.raises(ValueError, match="positions up to 64, got 64 rows"):
        fusewise.rope(Q, K, **TABLE, offset=59)
    fusewise.rope(Q, K, inv_freq=FREQ, offset=2**31 - 6)
    with pytest.raises(ValueError, match="offset must leave the 6 positions"):
        fusewise.rope(Q, K, inv_freq=FREQ, offset=2**31 - 5)
    fusewise.rope(Q, K, **TABLE, offset=0)
    with pytest.raises(ValueError, match="offset must be >= 0"):
        fusewise.rope(Q, K, **TABLE, offset=-1)
    with pytest.raises(ValueError, match="cos must not require grad"):
        fusewise.rope(Q, K, cos=COS.clone().requires_grad_(), sin=SIN)
    with pytest.raises(ValueError, match="got 5 rows"):
        fusewise.rope(Q, K, cos=COS[:5], sin=SIN[:5])
    with pytest.raises(ValueError, match="contiguous last dimension"):
        fusewise.rope(Q.mT.contiguous().mT, K, **TABLE)
    fusewise.rope(THD, **TABLE, layout="thd", cu_seqlens=CU)
    with pytest.raises(ValueError, match="cu_seqlens must be contiguous"):
        fusewise.rope(THD, **TABLE, layout="thd", cu_seqlens=torch.stack((CU, CU), 1)[:, 0])
    with pytest.raises(TypeError, match="offset must be an int"):
        fusewise.rope(Q, K, **TABLE, offset=False)


def cached(q: torch.Tensor, k: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    q, caches = q.clone(), torch.zeros(2, 1, 12, 2, 16)
    fusewise.rope_and_cache_(q, k, k, *caches, torch.arange(12).view(2, 6), layout="bshd", write_k=False, **options)
    return q, caches[0]


WAYS: dict[str, Any] = {
    "rope": fusewise.rope,
    "rope_": lambda q, k, **options: fusewise.rope_(q.clone(), k.clone(), **options),
    "qk_norm_rope": lambda q, k, **options: fusewise.qk_norm_rope(q, k, FREQ.repeat(2), FREQ.repeat(2), **options),
    "rope_and_cache_": cached,
}


@pytest.mark.parametrize("kind", [numpy.int8, numpy.array])
@pytest.mark.parametrize(
    "options",
    [
        {"offset": 125},  # as an int8 it would overflow at the third token
        {"rotary_dim": 8, "rotary_start": -8}, {"context_parallel": (1, 2)},
        {"sections": (4, 2, 2), "positions": torch.randint(9, (3, 6))},
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_integers_of_numpy_are_taken(way: str, options: dict[str, Any], kind: Any) -> None:
    if way == "rope_and_cache_":
        options = {name: value for name, value in options.items() if name != "context_parallel"}  # it has none
    converted = {
        name: tuple(map(kind, x)) if isinstance(x, tuple) else kind(x) if isinstance(x, int) else x
        for name, x in options.items()
    }
    frequencies = FREQ[: options.get("rotary_dim", 16) // 2]
    results = [WAYS[way](Q, K, inv_freq=frequencies, **given) for given in (options, converted, converted)]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_sparse_positions_are_not_those_of_stride_0() -> None:
    """A 1-D sparse tensor reports the strides of an expanded one."""
    q, table = torch.randn(1, 6, 2, 16), make_table("half", 8, 1, torch.float32)
    positions = torch.zeros(1, dtype=torch.int64).expand(6)
    fusewise.rope(q, **table, positions=positions)
    with pytest.raises(TypeError, match="positions must be a strided tensor"):
        fusewise.rope(q, **table, positions=positions.to_sparse())


def test_strides_of_no_elements_say_nothing() -> None:
    """With no tokens any strides are valid."""
    q = torch.empty(2, 0, 4, 16).as_strided((2, 0, 4, 16), (0, 0, 1, 5))
    assert fusewise.rope(q, **TABLE).shape == q.shape


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_strides_of_tables_without_elements_say_nothing(impl: str) -> None:
    """They may differ: `.contiguous()` would change neither."""
    q, k = torch.empty(0, 6, 4, 16), torch.empty(0, 6, 2, 16)
    y, z = fusewise.rope(q, k, cos=torch.empty(0, 6, 8), sin=torch.empty(0, 8, 6).mT, impl=impl)
    assert y.shape == q.shape and z.shape == k.shape
    y = fusewise.rope(Q, cos=torch.empty(0, 8), sin=torch.empty(8, 0).mT, positions=IDS, impl=impl)
    assert y.isnan().all()


def test_strides_of_a_single_row_say_nothing() -> None:
    """In a decode step one table may be a slice of one row and the other a new tensor."""
    cos, sin = COS[3:4], SIN[3:4].as_strided((1, 8), (99, 1))
    expected = fusewise.rope(Q[:, :1], K[:, :1], **TABLE, offset=3)
    for tables in ({"cos": cos, "sin": sin}, {"cos": cos[None], "sin": sin.as_strided((1, 1, 8), (7, 5, 1))}):
        for y, exact in zip(fusewise.rope(Q[:, :1], K[:, :1], **tables), expected, strict=True):
            assert torch.equal(y, exact)


def test_positions_that_cannot_be_known_are_nan_not_errors() -> None:
    """The host does not read tensor values: out-of-range positions give NaN in the rotated features, the rest is unchanged."""
    y = fusewise.rope(Q, **TABLE, positions=torch.tensor([0, 64, -1, 63, 2**40, 5]))
    assert y[:, [1, 2, 4]].isnan().all()
    assert y[:, [0, 3, 5]].isfinite().all()


def test_names_may_be_of_a_str_enumeration() -> None:
    """Members of a str enum equal their values but format differently."""

    class Name(str, enum.Enum):
        BHSD, INTERLEAVED, REFERENCE = "bhsd", "interleaved", "reference"

    q = torch.randn(2, 3, 5, 16)
    expected = fusewise.rope(q.transpose(1, 2), inv_freq=FREQ, pairing="interleaved").transpose(1, 2)
    for layout, pairing, impl in (tuple(Name), tuple(name.value for name in Name)):
        y = fusewise.rope(q, inv_freq=FREQ, layout=layout, pairing=pairing, impl=impl)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("sections", [(True, 4, 3), (1.0, 4, 3)], ids=str)
def test_what_equals_sections_that_have_passed_is_refused(sections: tuple[Any, ...]) -> None:
    call = {**TABLE, "positions": IDS.expand(3, 6)}
    fusewise.rope(Q, **call, sections=(1, 4, 3))
    with pytest.raises(ValueError, match="sections must be three numbers of pairs"):
        fusewise.rope(Q, **call, sections=sections)
