"""q, k and the tables of the models of transformers, Liger and diffusers."""

from __future__ import annotations

import torch
from compat_statement import DEVICE, randn
from torch import Tensor

B, T, HQ, HK, D = 2, 5, 4, 2, 16


def pair(layout: str = "bhsd", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """q and k as in models: stored as (B, T, H, D)."""
    q, k = randn(B, T, HQ, D, dtype=dtype), randn(B, T, HK, D, dtype=dtype)
    return (q.transpose(1, 2), k.transpose(1, 2)) if layout == "bhsd" else (q, k)


def table(width: int, batch: int = B, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (batch, T, width / 2)."""
    angles = torch.rand(batch, T, width // 2, device=DEVICE) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def twice(*tables: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.cat((t, t), -1) for t in tables)


def repeated(*tables: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.repeat_interleave(2, -1) for t in tables)


def once(*tables: Tensor) -> tuple[Tensor, ...]:
    return tables
