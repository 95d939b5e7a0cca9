"""Fixtures of the gated linear unit's tests."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from ctypes import PYFUNCTYPE, py_object
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewise
from fusewise._shared import build, cuda, host
from fusewise.ops.gated_linear import _cuda, _host, _onednn, _op

from .. import cuda_on_cpu


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


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No product is oneDNN's, in C++ neither: those of float32 take no memory of their own then."""

    def tell() -> None:
        if _host.gated_linear is not host.not_loaded:
            _host.load(_op.implementation("cpu")._kernel())

    with monkeypatch.context() as patch:
        patch.setattr(_onednn, "there", lambda: False)
        tell()
        yield
    tell()


def _kernels(dtype: torch.dtype, activation: str, *_: Any) -> cuda_on_cpu.Library:
    only = _cuda.one(dtype, activation)
    return cuda_on_cpu.library(_cuda, "fusewise_gated_linear", cuda.PARTS, *only).plays(processors=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of the tensors, which `impl="cuda"` and the extension take: a GPU, or a CPU with the CUDA kernels compiled for it
    and an extension that takes its tensors for those of a GPU."""
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
