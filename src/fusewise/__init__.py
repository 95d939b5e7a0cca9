"""fusewise: fused kernels for PyTorch, and the evidence that they are worth it.

    rope, rope_          rotary position embedding of q, or of q and k in one launch; rope_ in place
    qk_norm_rope         RMSNorm of q and k, then RoPE
    rope_and_cache_      RoPE, then the write of k and v into a KV cache
    geglu_linear         linear and GEGLU as one operation
    gated_linear         the same for six activations and every layout of the weights
    gated_mlp            the same and the projection down
    explain_dispatch     which implementation a call takes, and why not another
    study                every way of running a function on this machine, compared; needs fusewise[lab]

`fusewise.nn` has modules over these, `fusewise.ops.rope.tables` the frequencies of published models, `fusewise.compat`
the signatures of other libraries, `fusewise.integrations` and `fusewise.distributed` what other frameworks need.
`fusewise.native.build()` compiles the native code ahead of the first call.
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
# Not `study`: a star import would bring the lab with all that it needs.
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


_SUBMODULES = ("compat", "distributed", "integrations", "native", "nn")  # imported when they are first asked for
study: Callable[..., Any]  # `fusewise.lab.api.study`, imported by `__getattr__` when it is first asked for

if not TYPE_CHECKING:  # a type checker would take every misspelt name of this module for one that it has

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name != "study":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(".lab.api", __name__).study
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; pip install 'fusewise[lab]'", name=error.name) from error
