"""fusewise: fused kernels for PyTorch and the evidence that they are worth it."""

import importlib
from typing import Any

from .ops.dispatch import Dispatch as Dispatch
from .ops.dispatch import explain_dispatch as explain_dispatch
from .ops.gated_linear import gated_linear as gated_linear
from .ops.gated_linear import gated_mlp as gated_mlp
from .ops.gated_linear import geglu_linear as geglu_linear
from .ops.qk_norm_rope import qk_norm_rope as qk_norm_rope
from .ops.rope import rope as rope
from .ops.rope import rope_ as rope_
from .ops.rope_and_cache import rope_and_cache_ as rope_and_cache_

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`fusewise.study`, which brings the lab with it, is imported when it is first asked for."""
    if name == "study":
        return importlib.import_module(".lab.api", __name__).study
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
