"""The gated linear unit: one operation, several implementations, one contract (`api.gated_linear`)."""

from .api import gated_linear as gated_linear
from .api import gated_mlp as gated_mlp
from .api import geglu_linear as geglu_linear
