"""What the C++ fast path computes of GPU calls that record gradients, once Python has served such a call: the bits of Python. On a
CPU, too, by the CUDA kernels compiled for it and an extension that takes its tensors for those of a GPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from ctypes import PYFUNCTYPE, py_object
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise import gated_linear, gated_mlp
from fusewise._shared import build, cuda, host
from fusewise.ops.gated_linear import _cuda, _host, _op
from fusewise.ops.gated_linear._problem import Spec

from .. import cuda_on_cpu
from ..gpu_memory import peak_above, settled
from .host_calls import assert_same, by_python, forbid_operators, of_mlp, operands, requiring, trained

KINDS = [(torch.bfloat16, "gelu_tanh"), (torch.float16, "silu")]
DTYPE, ACTIVATION = KINDS[0]
OPTIONS = {"activation": ACTIVATION, "impl": "cuda"}
FORMS = ["stacked", "stacked bias", "separate", "separate bias"]
# Few rows in every rank; several partial sums, the last of fewer rows; on a GPU enough for Python to pad products of other sizes.
ROWS = {"cpu": [(), (5,), (2, 3), (2, 2, 3), (150,)]}
ROWS["cuda"] = [*ROWS["cpu"], (2, 260)]
# Of no other test: what is remembered here stays.
FEATURES, HIDDEN, OUT = 88, 168, 56
WANTS = False, True, True, False, True  # to overwrite; the gradients of x, weight, w_gate and the biases

NAMES = {_host.KEEPING: "kept", _host.BACKWARD: "gradients", _host.MLP_BACKWARD: "mlp_gradients"}
functions = pytest.mark.parametrize("function", [gated_linear, gated_mlp])
jobs = pytest.mark.parametrize("job", NAMES, ids=NAMES.get)
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@functools.cache
def _for_cpu_tensors() -> Any:
    """The extension with CPU tensors in the place of a GPU's."""
    name, sources, compiler, flags = _host.recipe()
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / source.relative_to(Path(fusewise.__file__).parent) for source in sources]
        for source, copy in zip(sources, copies, strict=True):
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text()
            if source.name == "host_call.h":
                assert text.count("return !x->is_cpu();") == 1
                text = text.replace("return !x->is_cpu();", "return true;")
            copy.write_text(text)
        return PYFUNCTYPE(py_object)(
            ("fusewise_gated_host", build.library(f"{name}-on-cpu", copies, compiler, flags))
        )()


def _kernels(dtype: torch.dtype, activation: str, *_: Any) -> cuda_on_cpu.Library:
    only = _cuda.one(dtype, activation)
    return cuda_on_cpu.library(_cuda, "fusewise_gated_linear", cuda.PARTS, *only).plays(processors=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of the tensors, which `impl="cuda"` and the extension take."""
    found: str = request.param
    if found == "cuda" and (reason := _cuda.unavailable("cuda")) is not None:
        pytest.skip(reason)
    try:
        module = _for_cpu_tensors() if found == "cpu" else _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    # It would serve some calls of `impl="cuda"`, too.
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: False)
    if found == "cuda":
        yield found
        return
    monkeypatch.setattr(_cuda, "_kernel", _kernels)
    monkeypatch.setattr(_cuda, "processors_of", lambda _: 2)
    monkeypatch.setattr(_cuda, "unavailable", lambda _: None)
    monkeypatch.setattr(_host, "extension", lambda: module)
    monkeypatch.setattr(host, "_loaded", [module])
    for name in ("gated_linear", "kept", "gradients", "mlp_gradients"):
        monkeypatch.setattr(_host, name, getattr(module, name))
    monkeypatch.setattr(_host, "_new", module.new)
    caches = _op.choice.unavailable, _op.choice.choose, _op.choice.serving  # of answers without these kernels
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


Case = tuple[dict[str, Any], Tensor, dict[str, Any]]  # tensors that require gradients, the upstream gradient, options


def redrawn(t: Tensor) -> Tensor:
    """Another tensor of the same sizes and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).normal_()


def check(cases: list[Case], monkeypatch: pytest.MonkeyPatch, function: Any = gated_linear) -> None:
    """Check that a second call with other values is served by C++, with the bits of Python."""
    expected = []
    for made, upstream, options in cases:
        others = requiring({name: None if t is None else redrawn(t) for name, t in made.items()})
        trained(others, redrawn(upstream), function, **options)
        expected.append(by_python(trained, made, upstream, function, **options))
    with monkeypatch.context() as patch:
        forbid_operators(patch)
        for (made, upstream, options), theirs in zip(cases, expected, strict=True):
            assert_same(trained(made, upstream, function, **options), theirs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
@pytest.mark.parametrize("form", FORMS)
def test_training_has_the_bits_of_python(
    form: str, kind: tuple[torch.dtype, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, activation = kind
    cases = []
    for rows in ROWS[device]:
        made = requiring(operands(rows, FEATURES, HIDDEN, dtype, form, device))
        dy = torch.randn(*rows, HIDDEN).to(device, dtype)
        for gate_first in (False, True):
            cases.append((made, dy, {"activation": activation, "gate_first": gate_first, "impl": "cuda"}))
    check(cases, monkeypatch)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_training_an_mlp_has_the_bits_of_python(
    save: str, form: str, kind: tuple[torch.dtype, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, activation = kind
    cases = []
    for rows in ROWS[device]:
        made = requiring(of_mlp(operands(rows, FEATURES, HIDDEN, dtype, form, device), OUT))
        dz = torch.randn(*rows, OUT).to(device, dtype)
        for gate_first in (False, True)[: 1 if "separate" in form else 2]:
            options = {"activation": activation, "gate_first": gate_first, "save": save, "impl": "cuda"}
            cases.append((made, dz, options))
    check(cases, monkeypatch, gated_mlp)


def test_operands_with_strided_rows_are_trained(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """x, both weights, that of a down projection, and the upstream gradient: rows of wider matrices."""

    def wide(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns + 16).to(device, DTYPE)[:, 8 : 8 + columns]

    made = requiring({"x": wide(150, FEATURES), "weight": wide(HIDDEN, FEATURES), "w_gate": wide(HIDDEN, FEATURES)})
    check([(made, wide(150, HIDDEN), OPTIONS)], monkeypatch)
    stacked = requiring({"x": wide(150, FEATURES), "weight": wide(2 * HIDDEN, FEATURES)})
    check([(stacked, wide(150, HIDDEN), OPTIONS)], monkeypatch)
    mlp = requiring(
        {
            "x": wide(150, FEATURES),
            "w_gate": wide(HIDDEN, FEATURES),
            "w_up": wide(HIDDEN, FEATURES),
            "w_down": wide(OUT, HIDDEN),
        }
    )
    check([(mlp, wide(150, OUT), OPTIONS)], monkeypatch, gated_mlp)


@pytest.mark.parametrize("wanted", ["x", "weight", "w_gate", "bias", "b_gate", "x b_gate", "weight bias"])
def test_only_wanted_gradients_are_computed(wanted: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device)
    dy = torch.randn(40, HIDDEN).to(device, DTYPE)
    made = {name: t.requires_grad_(name in wanted.split()) for name, t in made.items()}
    trained(made, dy, **OPTIONS)
    expected = by_python(trained, made, dy, **OPTIONS)
    forbid_operators(monkeypatch)
    found = trained(made, dy, **OPTIONS)
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    assert_same(found, expected)


@pytest.mark.parametrize("wanted", ["x", "w_gate", "w_up", "b_gate", "b_up", "w_down", "b_down", "w_down b_up"])
def test_only_wanted_gradients_of_an_mlp_are_computed(
    wanted: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of_mlp(operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device), OUT)
    dz = torch.randn(40, OUT).to(device, DTYPE)
    made = {name: t.requires_grad_(name in wanted.split()) for name, t in made.items()}
    trained(made, dz, gated_mlp, **OPTIONS)
    expected = by_python(trained, made, dz, gated_mlp, **OPTIONS)
    forbid_operators(monkeypatch)
    found = trained(made, dz, gated_mlp, **OPTIONS)
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    assert_same(found, expected)


@functions
def test_pre_activations_are_overwritten_only_if_nobody_needs_them(
    function: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the version counter told, so that a second backward could not take them for what they were."""
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device)
    made = requiring(made if function is gated_linear else of_mlp(made, OUT))
    out = function(**made, **OPTIONS)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    leaves = list(made.values())
    forbid_operators(monkeypatch)
    for retain in (True, False):
        y = function(**made, **OPTIONS)
        preact = y.grad_fn.saved_tensors[-1]
        before, version = preact.clone(), preact._version
        gradients = torch.autograd.grad(y, leaves, upstream, retain_graph=retain)
        assert torch.equal(preact, before) == retain and (preact._version == version) == retain
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert torch.equal(gradient, leaf.grad)
        if retain:
            again = torch.autograd.grad(y, leaves, upstream)
            assert all(map(torch.equal, gradients, again))


def asked(
    job: int, device: str, rows: int = 40, features: int = FEATURES, hidden: int = HIDDEN, out: int = OUT, *, impl: str = "cuda",
    kind: tuple[torch.dtype, str] = KINDS[0], whole: int = 0, gate_first: bool = False,
) -> list[Any]:  # fmt: skip
    """The arguments of the function of `job`, for a stacked weight. Rows of dz, w_down, x and the weight are parts of those of
    matrices with `whole` columns, if that is not 0."""
    dtype, activation = kind

    def some(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, whole or columns).to(device, dtype)[:, :columns]

    weights = some(2 * hidden, features), None, None, None
    call = _host.arguments_of(some(rows, features), weights, Spec(activation, "stacked", gate_first), impl)
    preact = torch.randn(rows, 2 * hidden).to(device, dtype)
    dy, dz, w_down = torch.randn(rows, hidden).to(device, dtype), some(rows, out), some(out, hidden)
    before = {_host.KEEPING: (), _host.BACKWARD: (dy, preact, *WANTS), _host.MLP_BACKWARD: (dz, preact, *WANTS, True, True, w_down)}  # fmt: skip
    return [*before[job], *call]


@torch.no_grad()
def serves(job: int, arguments: list[Any]) -> bool:
    return getattr(_host, NAMES[job])(*arguments) is not None


@torch.no_grad()
def remember(job: int, arguments: list[Any]) -> None:
    _host.remember(job, *arguments)


@torch.no_grad()
def new(job: int, arguments: list[Any]) -> bool:
    found: bool = _host._new(job, *arguments)
    return found


@jobs
def test_what_differs_is_asked_for_anew(job: int, device: str) -> None:
    size = {"rows": 48 + job}  # of no other test
    assert new(job, asked(job, device, **size)) and not serves(job, asked(job, device, **size))
    remember(job, asked(job, device, **size))
    assert serves(job, asked(job, device, **size)) and not new(job, asked(job, device, **size))
    others: list[dict[str, Any]] = [
        {"rows": 47}, {"features": 80}, {"hidden": 136}, {"kind": (torch.float16, ACTIVATION)}, {"kind": (DTYPE, "silu")},
        {"whole": 256}, {"impl": "auto"}, {"gate_first": True}, *([{"out": 64}] if job == _host.MLP_BACKWARD else []),
    ]  # fmt: skip
    for other in others:
        given = asked(job, device, **{**size, **other})
        assert not serves(job, given) and new(job, given)
    for j in NAMES:
        if j != job:
            assert new(j, asked(j, device, **size))


@jobs
def test_what_tma_cannot_describe_is_pythons(job: int, device: str) -> None:
    """Like a cached call, but with an unaligned address, or rows that do not start at multiples of 16 bytes."""
    arguments = asked(job, device)
    remember(job, arguments)
    assert serves(job, arguments)
    for place, t in enumerate(arguments):
        if isinstance(t, Tensor):
            address = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
            rows = t.new_empty(t.shape[0], t.shape[1] + 1)[:, : t.shape[1]].copy_(t)
            for odd in (address, rows, t[:1].expand(t.shape)):
                given = [*arguments[:place], odd, *arguments[place + 1 :]]
                assert not serves(job, given) and not new(job, given)
    assert not new(job, asked(job, device, hidden=164))


@jobs
def test_products_that_python_pads_are_pythons(job: int, device: str) -> None:
    """Those of the backward, if features in or out are no multiple of eight. Kernels take such matrices, if rows are aligned."""
    features, out = asked(job, device, features=76, whole=128), asked(job, device, out=44, whole=128)
    assert new(job, features) is (job == _host.KEEPING)
    assert new(job, out) is (job != _host.MLP_BACKWARD)


@jobs
def test_what_has_no_launcher_is_pythons(job: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("keeping", "taking_gradient", "taking_down_gradient"):
        monkeypatch.setattr(_op, name, lambda *_: SimpleNamespace())
    arguments = asked(job, device, hidden=176)
    remember(job, arguments)
    assert not serves(job, arguments) and not new(job, arguments)


@jobs
def test_auto_is_kept_where_it_takes_cuda(job: int, device: str) -> None:
    """Not up to 128 rows."""
    for rows in (120, 150):
        arguments = asked(job, device, rows, impl="auto")
        remember(job, arguments)
        assert not new(job, arguments) and serves(job, arguments) is (rows == 150)


@functions
def test_a_profile_shows_what_training_computes(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate", device)
    made = requiring(made if function is gated_linear else of_mlp(made, OUT))
    upstream = torch.randn_like(function(**made, **OPTIONS))
    trained(made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    with torch.profiler.profile() as profile:
        trained(made, upstream, function, **OPTIONS)
    names = {event.name for event in profile.events()}
    gradient = "grad" if function is gated_linear else "down_grad"
    assert {f"fusewise::gated_linear_{name}" for name in ("preact", gradient)} <= names


def case(
    function: Any, device: str, rows: int, features: int = 520, hidden: int = 1032, out: int = 264
) -> tuple[dict[str, Any], Tensor]:
    """Tensors of a call and its upstream gradient; Python has served one like it, and C++ another."""
    made = operands((rows,), features, hidden, DTYPE, "separate bias", device)
    made = requiring(made if function is gated_linear else of_mlp(made, out))
    upstream = torch.randn(rows, hidden if function is gated_linear else out).to(device, DTYPE)
    for _ in range(2):
        trained(made, upstream, function, **OPTIONS)
    return made, upstream


@on_gpu
@functions
@pytest.mark.parametrize("rows", [40, 600])
def test_unaligned_operands_are_trained_by_python(rows: int, function: Any, device: str) -> None:
    """Right, also after aligned ones of the same sizes were served here."""
    made, upstream = case(function, device, rows)

    def shifted(t: Tensor) -> Tensor:
        return t.detach().new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t.detach())

    aligned = by_python(trained, made, upstream, function, **OPTIONS)
    for name, t in made.items():
        odd = {**made, name: shifted(t).requires_grad_()}
        found = trained(odd, upstream, function, **OPTIONS)
        assert_same(found, by_python(trained, odd, upstream, function, **OPTIONS))
        for ours, theirs in zip(found, aligned, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))
    assert_same(
        trained(made, shifted(upstream), function, **OPTIONS),
        by_python(trained, made, shifted(upstream), function, **OPTIONS),
    )


@on_gpu
@functions
def test_large_pre_activations(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 MiB: two tensors, by Python; behind a down projection one."""
    made, upstream = case(function, device, 1 << 14, 64, 1 << 12, 64)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    if function is gated_mlp:
        forbid_operators(monkeypatch)
    assert_same(trained(made, upstream, function, **OPTIONS), expected)


@on_gpu
@functions
def test_streams(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 256)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = requiring({name: t.detach().clone() for name, t in made.items()})
        found = trained(late, upstream.clone(), function, **OPTIONS)
    stream.synchronize()
    assert_same(found, expected)


@on_gpu
@functions
def test_graphs(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 256)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # cuBLAS allocates for a stream
        trained(made, upstream, function, **OPTIONS)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = trained(made, upstream, function, **OPTIONS)
    for t in found:
        assert t is not None
        t.zero_()
    graph.replay()
    assert_same(found, expected)


@on_gpu
@jobs
def test_autocast_and_float32_are_pythons(job: int, device: str) -> None:
    arguments = asked(job, device)
    remember(job, arguments)
    assert serves(job, arguments)
    with torch.autocast("cuda", torch.float16):
        assert not serves(job, arguments) and not new(job, arguments)
    assert not new(job, asked(job, device, rows=88, kind=(torch.float32, ACTIVATION)))


@on_gpu
@jobs
def test_where_gluon_takes_less_time_it_is_python_that_asks_it(
    job: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for `impl="cuda"`; without a product there is nothing that it would do in less."""
    if (reason := _op.unavailable("gluon", "cuda", DTYPE)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: True)
    arguments = asked(job, device, 2048, 1024, 2048, 1024)
    remember(job, arguments)
    assert not new(job, arguments) and serves(job, arguments) is (job == _host.BACKWARD)


@on_gpu
@functions
def test_memory_is_that_of_python(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 2056, 1024, 2048, 1024)

    def peaks() -> list[int]:
        leaves = list(made.values())
        before = settled()
        y = function(**made, **OPTIONS)
        found = [peak_above(before)]
        before = settled()
        gradients = torch.autograd.grad(y, leaves, upstream)
        found.append(peak_above(before))
        del y, gradients
        return found

    peaks()
    expected = by_python(peaks)
    forbid_operators(monkeypatch)
    assert peaks() == pytest.approx(expected, abs=1 << 12)
