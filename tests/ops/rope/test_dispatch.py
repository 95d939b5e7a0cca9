"""Which implementation a call takes, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewise
from fusewise.ops.rope import _host, _op

from .support import make_table

Q = torch.randn(1, 4, 2, 16)
TABLE = make_table("half", 8, 1, torch.float32)


def test_auto_takes_the_first_that_serves() -> None:
    told = fusewise.explain_dispatch(fusewise.rope, Q, **TABLE)
    native = _op.unavailable("cpu", "cpu", torch.float32) is None
    assert told.impl == ("cpu" if native else "reference") == _op.choose("cpu", torch.float32)
    assert told.op == "rope"
    assert set(told.passed_over) == set(_op.IMPLEMENTATIONS) - {told.impl}
    assert all(told.passed_over.values())
    assert str(told).splitlines()[0] == f"rope: {told.impl}, {told.reason}"
    assert len(str(told).splitlines()) == len(_op.IMPLEMENTATIONS)


def test_float64_takes_the_reference() -> None:
    told = fusewise.explain_dispatch(fusewise.rope_, Q.double(), **TABLE)
    assert (told.op, told.impl) == ("rope_", "reference")
    assert "float64" in told.passed_over["cpu"]
    torch.testing.assert_close(
        fusewise.rope(Q.double(), **TABLE), fusewise.rope(Q.double(), **TABLE, impl="reference"), rtol=0, atol=0
    )


@pytest.mark.gpu
def test_a_gpu_takes_a_kernel() -> None:
    q = Q.cuda()
    told = fusewise.explain_dispatch(fusewise.rope, q)
    assert told.impl in ("triton", "cuda")
    assert told.impl == _op.choose("cuda", torch.float32)


def test_what_auto_takes_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _host.forget()  # a call that has been before goes by the module's `launch`
    ran = []
    for impl in ("cpu", "reference"):
        module = _op.choice.implementation(impl)

        def recorded(*args: Any, impl: str = impl, launch: Any = module.launch) -> None:
            ran.append(impl)
            launch(*args)

        monkeypatch.setattr(module, "launch", recorded)
    fusewise.rope(Q, **TABLE)
    fusewise.rope(Q, **TABLE, impl="reference")
    fusewise.rope(Q.double(), **TABLE)
    assert ran == [fusewise.explain_dispatch(fusewise.rope, Q).impl, "reference", "reference"]


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'triton'.*TRITON_INTERPRET=1"):
        fusewise.rope(Q, **TABLE, impl="triton")
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'cpu'.*takes float32"):
        fusewise.rope(Q.double(), **TABLE, impl="cpu")
    told = fusewise.explain_dispatch(fusewise.rope, Q, impl="reference")
    assert told.reason == "as asked"
    with pytest.raises(ValueError, match="impl must be able to serve float32 on cpu, got 'triton'"):
        fusewise.explain_dispatch(fusewise.rope, Q, impl="triton")
    with pytest.raises(ValueError, match="got 'nosuch': it does not exist"):
        fusewise.explain_dispatch(fusewise.rope, Q, impl="nosuch")


def test_the_operator_itself_refuses_too() -> None:
    """A compiled graph may run where it was not traced."""
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'triton'"):
        torch.ops.fusewise.rope(Q, *TABLE.values(), None, None, None, 0, "", "triton", [])


def test_a_missing_compiler_leaves_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native kernel, no error: auto goes on to the next."""
    reason = "no C++ compiler was found"

    def without(impl: str, device_type: str, dtype: torch.dtype) -> str | None:
        return None if impl == "reference" else reason

    _op.choose.cache_clear()
    monkeypatch.setattr(_op.choice, "unavailable", without)
    try:
        told = fusewise.explain_dispatch(fusewise.rope, Q)
        assert told.impl == "reference"
        assert told.passed_over["cpu"] == reason
    finally:
        _op.choose.cache_clear()


def test_explain_dispatch_refuses_what_it_cannot_explain() -> None:
    with pytest.raises(TypeError, match=r"^explain_dispatch: op must be one of fusewise.rope"):
        fusewise.explain_dispatch(torch.sin, Q)
    with pytest.raises(TypeError, match=r"^explain_dispatch: args must hold a tensor, got none"):
        fusewise.explain_dispatch(fusewise.rope)
