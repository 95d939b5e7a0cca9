"""The lab: every way of running an operation, proved right, measured against this machine, in one record.

    capture (worker, timing, memory, truth)  →  record  →  analysis  →  render

What a package needs to add a provider or a target of its own is here; everything else is used through `fusewise study`.
"""

from .plugin import Missing, Provider, Run, Unsupported, require
from .problem import Problem, Program
from .targets import Target

__all__ = [
    "Missing",
    "Problem",
    "Program",
    "Provider",
    "Run",
    "Target",
    "Unsupported",
    "require",
]
