"""fusewise: fused kernels for PyTorch and the evidence that they are worth it."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


study: Callable[..., Any]  # of `fusewise.lab.api`, which comes, with all that it needs, when it is first asked for

if not TYPE_CHECKING:  # for which every misspelt name would be one

    def __getattr__(name: str) -> Any:
        if name != "study":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(".lab.api", __name__).study
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; pip install 'fusewise[lab]'", name=error.name) from error
