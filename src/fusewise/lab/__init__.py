"""The lab: every way of running an operation, proved right, measured against this machine, in one record.

    capture (worker, timing, memory, truth)  →  record  →  analysis  →  render

What a package needs to add a provider or a target of its own is here; everything else is used through `fusewise study`.
"""

from .plugin import Missing as Missing
from .plugin import Provider as Provider
from .plugin import Run as Run
from .plugin import Unsupported as Unsupported
from .plugin import require as require
from .problem import Problem as Problem
from .problem import Program as Program
from .targets import Target as Target
