"""Modules that write to their buffers and parameters when they are called, or read what was written."""

import warnings

import torch
from torch import nn


class Counting(nn.Module):
    """Keeps a running mean, which no output shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.mean(), 0.1)
        return 2 * x


class Telling(Counting):
    """Returns its buffers, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        return super().forward(x), self.mean, self.steps


class Setting(Counting):
    """Writes the same value at every call."""

    def forward(self, x):
        self.mean.copy_(x.mean())
        return 2 * x


class Settling(nn.Module):
    """The output depends on a buffer that converges, as in spectral norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0 - 1e-4))

    def forward(self, x):
        self.scale = self.scale.lerp(torch.ones(()), 0.5)
        return x * self.scale


class Dropping(Counting):
    """Deletes its buffer."""

    def forward(self, x):
        self.mean = None
        return 2 * x


class Growing(Counting):
    """Keeps the means of all calls."""

    def forward(self, x):
        self.mean = torch.cat([self.mean.view(-1), x.mean()[None]])
        return 2 * x


class Clamping(nn.Module):
    """Clamps its weights, including the frozen ones."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
            self.frozen.clamp_(max=2.0)
        return self.linear(x) * self.frozen


class Looking(nn.Module):
    """Its table is trained, and renormalised by the lookup itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=1.0)

    def forward(self, x):
        return x * self.table(torch.arange(3))


class LazilyNormalised(nn.Module):
    """Its buffers get a shape in the first call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x):
        return self.norm(x)


class Scaling(nn.Module):
    """Overwrites what its backward reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        self.scale.lerp_(torch.tensor(2.0), 0.5)
        return x * self.scale


normalised = nn.BatchNorm1d(4)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
