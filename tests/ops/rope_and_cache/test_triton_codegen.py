"""Machine code of the Triton kernel for sm_90, checked without a GPU: no spills, few registers, 16-byte loads and stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusewise.ops.rope_and_cache import _triton
from fusewise.ops.rope_and_cache._problem import CacheProblem

from ..rope.test_triton_codegen import PROCESSORS, compile_kernel

CALLS: dict[str, dict[str, Any]] = {
    "llama decode": {"tokens": 64},
    "llama prefill": {"tokens": 8192},
    "keeps k": {"tokens": 8192, "write_k": False},
    "interleaved": {"tokens": 8192, "pairing": "interleaved"},
    "fp32": {"tokens": 1024, "dtype": torch.float32},
    "head of 80": {"tokens": 1024, "width": 80},
    "block table": {"tokens": 64, "table": True},
}


def bound(
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    width: int = 128,
    write_k: bool = True,
    pairing: str = "half",
    table: bool = False,
) -> dict[str, Any]:
    """The kernel arguments for a call on views of a packed projection; data is never touched."""
    heads, kv_heads = 32, 8
    qkv = torch.empty(tokens, heads + 2 * kv_heads, width, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    key_cache, value_cache = torch.empty(2, 64, 16, kv_heads, width, dtype=dtype)
    slots, block_table = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, 8, dtype=torch.int32)
    problem = CacheProblem.build(
        q, k, v, key_cache, value_cache, None if table else slots, block_table if table else None,
        torch.empty(4096, width), None, torch.empty(tokens, dtype=torch.int64), None, None, 0,
        f"layout=thd table=fused pairing={pairing}", write_k,
    )  # fmt: skip
    return _triton.arguments(problem, PROCESSORS)[1]


def test_arguments_are_in_the_order_of_the_kernel() -> None:
    """A repeated launch passes them positionally: addresses, the offset, and the rest."""
    names = list(bound(64))
    assert names == [parameter.name for parameter in _triton.rope_and_cache_kernel.params]
    assert names[_triton.POINTERS] == "offset"
    assert all(name.endswith("_ptr") for name in names[: _triton.POINTERS])


@pytest.mark.parametrize("name", CALLS)
def test_widest_accesses_and_no_spills(name: str) -> None:
    code = compile_kernel(_triton.rope_and_cache_kernel, bound(**CALLS[name]), num_warps=_triton.NUM_WARPS)
    assert code.stack == 0 and not [i for i in code.instructions if i.startswith(("LDL", "STL"))], code
    # Allows 32 of an SM's 64 warps: few tokens are latency-bound, more are bound by loads in flight.
    assert code.registers <= 64, code
    halves = 1 if "interleaved" in name else 2
    # For few tokens a tile of k has 8 bytes per thread, so that all threads of the program have work.
    wide = [width for width in (64, 128) if width == 128 or CALLS[name]["tokens"] <= 64]
    loads, stores = (sum(code.widths(kind)[width] for width in wide) for kind in ("LDG", "STG"))
    # For q, k and v; k is written twice.
    assert loads >= 2 * halves + 1, code
    assert stores >= (2 + CALLS[name].get("write_k", True)) * halves + 1, code
    assert not {32, 16, 8} & set(code.widths("STG")), code
