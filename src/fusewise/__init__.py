"""fusewise: fused kernels for PyTorch, and the measurements that show what they are worth.

    rope, rope_          rotary position embedding of q, or of q and k in one launch; rope_ in place
    qk_norm_rope         RMSNorm of q and k, then RoPE
    rope_and_cache_      RoPE, then the write of k and v into a KV cache
    geglu_linear         linear and GEGLU in one operation
    gated_linear         the same for six activations and all weight layouts
    gated_mlp            the same, followed by the down projection
    explain_dispatch     which implementation a call uses, and why not another
    study                compares every way of running a function on this machine; needs fusewise[lab]

`fusewise.nn` has modules for these operators, `fusewise.ops.rope.tables` the frequencies of published models,
`fusewise.compat` the signatures of other libraries, `fusewise.integrations` and `fusewise.distributed` the adapters for
other frameworks. `fusewise.native.build()` compiles the native code ahead of the first call.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .ops.dispatch import Dispatch, explain_dispatch
from .ops.gated_linear import gated_linear, gated_mlp, geglu_linear
from .ops.qk_norm_rope import qk_norm_rope
from .ops.rope import rope, rope_
from .ops.rope_and_cache import rope_and_cache_

__version__ = "0.1.0"
# Not `study`: a star import would load the lab with all its dependencies.
__all__ = [
    "Dispatch",
    "explain_dispatch",
    "gated_linear",
    "gated_mlp",
    "geglu_linear",
    "qk_norm_rope",
    "rope",
    "rope_",
    "rope_and_cache_",
]


_SUBMODULES = ("compat", "distributed", "integrations", "native", "nn")  # imported on first access
study: Callable[..., Any]  # `fusewise.lab.api.study`, imported by `__getattr__` on first access

if TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import integrations as integrations
    from . import native as native
    from . import nn as nn
else:  # a type checker that saw this function would accept any misspelt attribute of this module

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name != "study":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(".lab.api", __name__).study
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; pip install 'fusewise[lab]'", name=error.name) from error
