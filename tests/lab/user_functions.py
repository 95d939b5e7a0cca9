"""Functions that tests study as a user's own; imported by worker processes by this file's path."""

import torch
from torch import nn


def rms(x, weight, eps: float = 1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def several(x, y, index):
    return {"sum": x + y[index], "product": [x * y[index]], "largest": x.argmax(-1)}


def doubled(x):
    return x * 2


def noisy(x):
    return nn.functional.dropout(x, 0.5)


def nothing(x):
    return None


def whole(x):
    return x.round().to(torch.int64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


not_a_function = 7
