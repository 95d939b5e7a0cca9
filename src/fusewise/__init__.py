"""fusewise: fused kernels for PyTorch and the evidence that they are worth it."""

from .ops.dispatch import Dispatch as Dispatch
from .ops.dispatch import explain_dispatch as explain_dispatch
from .ops.rope import rope as rope
from .ops.rope import rope_ as rope_

__version__ = "0.1.0"
