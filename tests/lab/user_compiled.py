"""Functions that compile themselves: apart from the others, since `torch.compile` takes seconds to import."""

import torch
from torch import nn


@torch.compile(backend="eager")
def compiled_inside(x, weight):
    return (x.bfloat16() @ weight.bfloat16()).relu()


of_torch_compile = torch.compile(nn.Linear(4, 4))
