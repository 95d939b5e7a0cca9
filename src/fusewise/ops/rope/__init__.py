"""Rotary position embedding: one operation, several implementations, one contract (`api.rope`)."""

from . import tables as tables
from .api import rope as rope
from .api import rope_ as rope_
