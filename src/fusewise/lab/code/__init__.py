"""What every compiler makes of a problem: its texts stage by stage, with counts and with the lines they come from.

One file a compiler: each has `stages(...)`, which a provider calls in its `stages` method. `worker` runs one provider in
a process of its own, `capture` asks all of them and writes the texts with their index. No GPU is needed: kernels for one
are compiled for `target` all the same.
"""

from .stage import Stage as Stage
