"""What all tests share: seeds, and which tests a process can run.

Kernels are checked in Triton's interpreter in a process of their own (TRITON_INTERPRET=1 decides, when a kernel is
decorated, whether it is compiled or interpreted): there the tests marked `interpreter` run and no others.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


def _mend_interpreter() -> None:
    """Triton 3.6 turns a loop bound into an int by `int(array)` of one element, which numpy 2.5 refuses. Later versions
    squeeze the array first; so does this."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_squeeze


def pytest_configure(config: pytest.Config) -> None:
    os.environ["FUSEWISE_TUNED"] = "0"  # tests are of what is here, not of what was tuned on this machine
    if INTERPRETER:
        import triton

        if triton.__version__.startswith("3.6."):
            _mend_interpreter()
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "interpreter: runs a kernel in Triton's interpreter (TRITON_INTERPRET=1)")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if ("interpreter" in item.keywords) == INTERPRETER]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
