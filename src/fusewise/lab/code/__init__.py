"""What every compiler makes of a problem: its intermediate representations stage by stage, with counts and source
locations.

One module per compiler, each with `stages(...)` for the provider's `stages` method. `worker` runs one provider in its
own process; `capture` queries all of them and writes the texts with an index. No GPU is needed: GPU kernels are
cross-compiled for `target`.
"""

from .stage import Stage as Stage
