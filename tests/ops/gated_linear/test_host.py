"""The C++ fast path of CPU calls: same results as Python, and fallback to Python for anything else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusewise
from fusewise import gated_linear, gated_mlp, geglu_linear
from fusewise._shared import build, host
from fusewise.lab.problem import Task
from fusewise.lab.providers.ours import GatedCpu
from fusewise.lab.targets import problem_for
from fusewise.nn import GatedLinear
from fusewise.ops.gated_linear import _host, _onednn, _op, api

from ..rope.support import Operators, assert_bits
from .host_calls import B, Named, W, X, by_python, load, operands, quick
from .test_validation import LAYOUTS, STACKED


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["stacked", "stacked bias", "separate", "separate bias", "stacked bias strided"])
def test_it_has_the_bits_of_python(form: str, dtype: torch.dtype) -> None:
    """For few and many rows (processed in chunks), for matrices and other ranks."""
    shapes = [((), 8, 5), ((1,), 33, 17), ((2, 3), 16, 24), ((2, 2, 3), 16, 24), ((64,), 31, 40), ((65,), 31, 40),
              ((16,), 512, 264), ((2, 530), 64, 136)]  # the last two are large enough for oneDNN  # fmt: skip
    for rows, features, hidden in [*(shapes if "strided" not in form else []), ((3,), 16, 24), ((600,), 8, 4100)]:
        made = operands(rows, features, hidden, dtype, form)
        for gate_first in (False, True):
            expected = by_python(gated_linear, **made, activation="silu", gate_first=gate_first)
            y = quick(**made, gate_first=gate_first)
            assert y is not None
            assert_bits(y, expected)
            assert y.shape == (*rows, hidden) and y.is_contiguous() and not y.requires_grad


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu", "relu", "sigmoid", "identity"])
def test_activations_are_those_of_python(activation: str) -> None:
    x, weight, bias = torch.randn(70, 9), torch.randn(22, 9), torch.randn(22)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    y = quick(x, weight, bias, activation=activation)
    assert y is not None
    assert_bits(y, by_python(gated_linear, x, weight, bias, activation=activation))


def test_public_functions_and_modules_do_not_pass_python(monkeypatch: pytest.MonkeyPatch) -> None:
    module = GatedLinear(8, 6, activation="gelu", bias=True)
    calls = [
        lambda: gated_linear(X, W[:6], B[:6], w_gate=W[6:], b_gate=B[6:], activation="silu"),
        *(lambda a=a, first=first: geglu_linear(X, W, B, approximate=a, gate_first=first) for a in ("tanh", "none") for first in (False, True)),
        lambda: module(X),
    ]  # fmt: skip
    with torch.no_grad():
        expected = [by_python(call) for call in calls]
        monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated in Python"))
        for call, y in zip(calls, expected, strict=True):
            assert_bits(call(), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_mlp_goes_through_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated unit (gate first or not, one weight or two) and the down projection; bitwise equal to Python."""
    calls = []
    down, b_down = torch.randn(7, 6).to(dtype), torch.randn(7).to(dtype)
    for rows in ((), (3,), (2, 3), (2, 2, 3)):
        x, w, b = torch.randn(*rows, 8).to(dtype), W.to(dtype), B.to(dtype)
        for bias in (True, False):
            more = {"b_gate": b[:6], "b_up": b[6:], "b_down": b_down} if bias else {}
            calls.append(lambda x=x, w=w, more=more: gated_mlp(x, w[:6], w[6:], down, activation="silu", **more))
            more = {"b_gate": b} if bias else {}
            for first in (False, True):
                calls.append(
                    lambda x=x, w=w, more=more, first=first: gated_mlp(x, w, None, down, activation="gelu", gate_first=first, **more)
                )  # fmt: skip
    expected = [by_python(call) for call in calls]
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated in Python"))
    for call, z in zip(calls, expected, strict=True):
        found = call()
        assert_bits(found, z)
        assert found.stride() == z.stride()


@pytest.mark.parametrize(
    "down",
    [torch.randn(7, 5), torch.randn(7, 6).double(), torch.empty(7, 6, device="meta"), torch.randn(6, 7).T, torch.randn(7, 6, 1), torch.randn(0, 6), "a matrix", None],
    ids=["width", "dtype", "device", "strides", "dimensions", "rows", "kind", "none"],
)  # fmt: skip
def test_a_projection_that_is_wrong_is_named_by_python(down: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="gated_mlp: w_down must "):
        gated_mlp(X, W[:6], W[6:], down, activation="silu")
    with pytest.raises((TypeError, ValueError), match="gated_mlp: b_down must "):
        gated_mlp(X, W[:6], W[6:], torch.randn(7, 6), activation="silu", b_down=torch.randn(6))


@pytest.mark.filterwarnings("ignore::UserWarning")  # raised by torch for such tensors
def test_a_projection_without_strides_is_named_by_python() -> None:
    sparse, nested = torch.eye(6).to_sparse_csr(), torch.nested.nested_tensor([torch.randn(6)] * 7)
    for down, got in ((sparse, "torch.sparse_csr"), (nested, "nested")):
        with pytest.raises(TypeError, match=f"gated_mlp: w_down must be a strided tensor, got {got}"):
            gated_mlp(X, W[:6], W[6:], down, activation="silu")


def test_inference_is_pythons_where_gradients_are_recorded() -> None:
    x, weight = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    for args in ((x, W), (X, weight), (X, W, B.clone().requires_grad_()), (X, W[:6], None)):
        more = {"w_gate": weight[:6]} if args[1] is not W and args[1] is not weight else {}
        assert quick(*args, **more) is None
        assert gated_linear(*args, **more, activation="silu").requires_grad
        with torch.no_grad():
            assert quick(*args, **more) is not None
    with torch.inference_mode():
        y = quick(x, weight)
        assert y is not None and y.is_inference()
    assert_bits(y, by_python(gated_linear, x, weight, activation="silu").detach())


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


ODD: dict[str, Callable[[], dict[str, Any]]] = {
    "a subclass": lambda: {"x": X.as_subclass(Named)},
    "a weight of a subclass": lambda: {"weight": W.as_subclass(Named)},
    "meta": lambda: {"x": X.to("meta"), "weight": W.to("meta")},
    "float64": lambda: {"x": X.double(), "weight": W.double()},
    "a lazy negation": lambda: {"x": torch.randn(3, 8, dtype=torch.complex64).conj().imag},
    "no rows": lambda: {"x": X[:0]},
    "strided features": lambda: {"x": torch.randn(3, 16)[:, ::2]},
    "strided rows of a tensor": lambda: {"x": torch.randn(4, 6, 8)[:, ::2]},
    "five dimensions": lambda: {"x": torch.randn(1, 1, 1, 3, 8)},
    "a weight in three dimensions": lambda: {"weight": W.view(2, 6, 8)},
    "interleaved": lambda: {"layout": "interleaved"},
    "the reference": lambda: {"impl": "reference"},
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_calls_are_pythons(odd: str) -> None:
    call = {"x": X, "weight": W, **ODD[odd]()}
    assert quick(**call) is None
    y = gated_linear(**call, activation="silu")
    assert y.shape == (*call["x"].shape[:-1], 6) and type(y) is type(by_python(gated_linear, **call, activation="silu"))


@pytest.mark.parametrize(
    ("error", "match", "args", "kwargs"), STACKED + LAYOUTS, ids=lambda row: row if isinstance(row, str) else ""
)
def test_mistakes_are_named_by_python(
    error: type[Exception], match: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """With the same message as without the fast path."""
    call = {"activation": "silu", **kwargs}
    assert quick(*args, **call) is None
    texts = []
    for way in (gated_linear, lambda *args, **kwargs: by_python(gated_linear, *args, **kwargs)):
        with pytest.raises(error, match=match) as caught:
            way(*args, **call)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("more", [{"activation": 1}, {"activation": "Silu"}, {"gate_first": 1}, {"gate_first": None}, {"save": None}, {"impl": b"cpu"}, {"layout": 0}, {"bias": 1.0}, {"w_gate": [1]}])  # fmt: skip
def test_options_of_other_kinds_are_pythons(more: dict[str, Any]) -> None:
    assert quick(X, W, **more) is None
    with pytest.raises((TypeError, ValueError), match=" must "):
        gated_linear(X, W, **{"activation": "silu", **more})


def test_it_wants_all_arguments() -> None:
    with pytest.raises(TypeError, match="must have 10 arguments, got 2"):
        _host.gated_linear(X, W)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::torch.jit.TracerWarning",
)
def test_who_watches_sees_the_operator() -> None:
    """Dispatch modes, tracing, torch.func, forward-mode AD and profilers still see the call."""

    def call(x: Tensor) -> Tensor:
        return gated_linear(x, W, B, activation="silu")

    with Operators() as watching:
        expected = call(X)
    assert watching.names["fusewise::gated_linear"] == 1
    with torch.device("cpu"):  # a torch function mode
        assert quick(X, W, B) is None
    with torch.autograd.forward_ad.dual_level():
        assert quick(X, W, B) is None
    y = quick(X, W, B)
    assert y is not None
    assert_bits(y, expected)
    mapped = torch.func.vmap(lambda x: gated_linear(x, W, B, activation="silu"))(X)
    torch.testing.assert_close(mapped, expected)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(X), mode.from_tensor(W)
        assert quick(*fakes) is None
        assert type(gated_linear(*fakes, activation="silu")) is type(fakes[0])
    graph = make_fx(call)(X)
    assert "fusewise.gated_linear" in graph.code
    traced = torch.jit.trace(call, (X,))
    assert "fusewise::gated_linear" in str(traced.graph)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_bits(compiled(X), expected)
    with torch.profiler.profile() as profile:
        call(X)
    assert "fusewise::gated_linear" in {event.name for event in profile.events()}


def test_autocast_is_pythons() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert quick(X, W) is None
        assert gated_linear(X, W, activation="silu").dtype == torch.bfloat16
    assert quick(X, W) is not None


def test_through_python_ends() -> None:
    with host.through_python():
        with host.through_python():
            assert quick(X, W) is None
        assert quick(X, W) is None
    assert quick(X, W) is not None


def test_without_it_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _op.implementation("cpu")._kernel()
    monkeypatch.setattr(build, "built", lambda *_: False)
    assert _host._unavailable.__wrapped__(kernel, 0) == "it is not built; run `fusewise build`"
    missing = build.Compiler((), "", "no compiler found")
    monkeypatch.setattr(build, "cxx", lambda: missing)
    assert _host._unavailable.__wrapped__(kernel, 0) == "no compiler found"
    monkeypatch.undo()

    def no_system() -> tuple[str, ...]:
        raise build.BuildError("made for Linux")

    monkeypatch.setattr(host, "flags", no_system)
    assert _host._unavailable.__wrapped__(kernel, 0) == "made for Linux"
    monkeypatch.setattr(_host, "unavailable", lambda _: "no compiler found")
    told = fusewise.explain_dispatch(geglu_linear, X, W)
    assert (told.impl, told.path) == (
        "cpu",
        "without the host fast path of gated_linear, geglu_linear and gated_mlp: no compiler found",
    )


def test_threads_of_python_call_at_once() -> None:
    x, weight = torch.randn(100, 64), torch.randn(512, 64)
    expected, wrong = quick(x, weight), []

    def work() -> None:
        for _ in range(50):
            y = quick(x, weight)
            if y is None or not torch.equal(y, expected):
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = """
import ctypes, os, signal, sys, torch, fusewise
from fusewise.ops.gated_linear import _host, _op
kernel = _op.implementation("cpu")._built()
if sys.argv[1] == "parent":
    _host.load(kernel)
x, weight = torch.randn(600, 8), torch.randn(4096, 8)
call = x, weight, None, "silu", None, None, "stacked", False, "preact", "auto"
assert torch.get_num_threads() == 1  # of the product, too; after this it is asked no more
ctypes.CDLL(None).omp_set_num_threads(2)  # of the gate
assert torch.get_num_threads() == 2
y = fusewise.gated_linear(x, weight, activation="silu", impl="reference")
if sys.argv[1] == "parent":
    _host.gated_linear(*call)
child = os.fork()
if child == 0:
    signal.alarm(30)
    if sys.argv[1] == "child":
        _host.load(kernel)
    made = _host.gated_linear(*call)
    torch.set_num_threads(1)  # to compare them: torch's own threads are the parent's
    os._exit(0 if torch.allclose(made, y, rtol=1e-4, atol=1e-5) else 1)  # another library may have multiplied
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("loaded_by", ["parent", "child"])
def test_a_forked_child_has_threads_of_its_own(loaded_by: str) -> None:
    """The OpenMP threads belong to the parent; waiting for them in the child would hang."""
    environment = {**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKED, loaded_by]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "0\n", done.stderr


def test_a_study_measures_what_is_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its caches start empty, and no call builds the extension; if the build fails, the worker's log has the reason."""
    problem = problem_for(Task("geglu", "quick-decode", "fp32", "fwd", "cpu", 0))
    names = []
    monkeypatch.setattr(_onednn, "there", lambda: False)
    monkeypatch.setattr(build, "prepared", lambda name, *_: names.append(name))
    GatedCpu().build(problem)
    assert names == ["gated-host"]

    def fails(*_: Any) -> None:
        raise build.BuildError("no headers of Python")

    monkeypatch.setattr(build, "prepared", fails)
    assert GatedCpu().build(problem).form == "chunked"
    monkeypatch.setattr(_onednn, "there", lambda: True)
    for transposed, form in ((False, "chunked-apart"), (True, "chunked-apart-dw")):
        monkeypatch.setattr(_onednn, "takes_transposed", lambda transposed=transposed: transposed)
        assert GatedCpu().build(problem).form == form
    assert capsys.readouterr().out == 3 * "calls go through Python: no headers of Python\n"
