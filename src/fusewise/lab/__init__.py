"""The benchmark lab: checks every provider of an operation for correctness, times it against this machine's limits, and
stores everything in one record.

    capture (worker, timing, memory, truth)  →  record  →  analysis  →  render

Exports what a package needs to add a provider or a target; everything else is used through `fusewise study`.
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
