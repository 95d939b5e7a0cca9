"""Shared by all tests: seeds, and the selection of tests that a process can run.

Tests in Triton's interpreter need their own process, since TRITON_INTERPRET=1 decides at decoration whether a kernel is
compiled or interpreted: such a process runs only the tests marked `interpreter`.
"""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
GIB = 2**30
#: GPU memory that each test process, with its children, may hold between tests.
PROCESS_GIB = 2


def _mend_interpreter() -> None:
    """Fix a bug of Triton 3.6, which converts loop bounds by `int(array)` of one element; numpy 2.5 refuses that. Later
    versions squeeze the array first; so does this.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_squeeze


def _patch_once() -> None:
    """Triton's interpreter replaces the functions of its language at a launch and again at every call of a device
    function, which takes a quarter of its time. Once per set of modules suffices until the launch ends.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    def patch_once(fn: Any) -> Any:
        seen = frozenset(
            value.__name__ for value in fn.__globals__.values() if value is language or value is language.core
        )
        if seen in patched:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = patch(fn)
        patched.add(seen)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.clear()

        scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_once


def _without_dead_checks() -> None:
    """The interpreter computes of every sum and product of integers whether it overflows, in 64 bits, and asserts it only in
    debug mode, which is off. That takes half of its time.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _within_arguments() -> None:
    """Every access of an interpreted kernel must be within a tensor that it was given, from its first element to the end of its
    last: beyond, a GPU may fault, and mostly reads what changes no result.
    """
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    extents: list[tuple[int, int]] = []

    def arguments_and_extents(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = arguments(self, args, kwargs)
        given = [getattr(x, "base", x) for x in (*hosts[0], *hosts[1].values())]
        tensors = [x for x in given if isinstance(x, torch.Tensor) and x.numel()]
        lasts = [sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        ends = [x.data_ptr() + (last + 1) * x.element_size() for x, last in zip(tensors, lasts, strict=True)]
        extents[:] = {(x.data_ptr(), end) for x, end in zip(tensors, ends, strict=True)}
        return hosts

    def check(ptrs: Any, mask: Any) -> None:
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        addresses = ptrs.data[mask.data]
        for start, end in extents:
            addresses = addresses[(addresses < start) | (addresses + size > end)]
        assert not addresses.size, f"{addresses.size} accesses outside of the arguments, the first at {addresses[0]:#x}"

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest, **options)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    executor._init_args_hst = arguments_and_extents
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def pytest_configure(config: pytest.Config) -> None:
    os.environ["FUSEWISE_TUNED"] = "0"  # test the code, not what was tuned on this machine
    # Read when torch is loaded, so for the test processes of `-n`, and for children. They share cores, so a thread that waits
    # for others must not spin: tests that use threads then take two to five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch.compile for CPUs compiles and loads test programs to find out which vector extensions the compiler supports,
    # again for every new cache, as in a study's workers. Every compiler that torch supports has those that it asks for.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if INTERPRETER:
        import triton

        if triton.__version__.startswith("3.6."):
            _mend_interpreter()
        _patch_once()
        _without_dead_checks()
        _within_arguments()
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "gpu_memory(gib): needs so much of a GPU's memory that it runs alone of them")
    config.addinivalue_line("markers", "interpreter: runs a kernel in Triton's interpreter (TRITON_INTERPRET=1)")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays: to search it for garbage takes a quarter of the collection, and seconds later.
    Nor does a test need as many searches as by default, which take a tenth of what torch.compile's tests do.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report what is left at exit as leaks
        gc.set_threshold(10_000, 20, 10)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if ("interpreter" in item.keywords) == INTERPRETER else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gpu_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Test processes running in parallel share a GPU: after each test, cached memory above one GiB is released, and
    tests that need much, `@pytest.mark.gpu_memory(gib)`, run one at a time.
    """
    mark = request.node.get_closest_marker("gpu_memory")
    if mark is None:
        yield
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > GIB:
            torch.cuda.empty_cache()
        return
    free, total = (size / GIB for size in torch.cuda.mem_get_info())
    needed = mark.args[0] + PROCESS_GIB * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if needed > total:
        pytest.skip(
            f"needs {needed} GiB on a GPU, all processes that test together; got {total:.0f}, {free:.0f} of them free"
        )
    workers = tmp_path_factory.getbasetemp().parent  # each worker has a folder there
    with (workers / "gpu_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()
