"""Sharding rules of RoPE: by batch entries or by heads; each rank rotates its shard, without communication.

All heads rotate alike and batch entries are independent, so a shard of either dimension is a smaller rotation. A table
or position tensor with a batch dimension is sharded with the batch, everything else is replicated. Tokens are not
sharded by these rules, since ranks do not know their positions: use `positions` or `context_parallel` on local tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..ops.rope._problem import Spec, layout_dims


@functools.cache
def register() -> None:
    """Let `fusewise.rope` (without `out`) and `fusewise.rope_` accept DTensors sharded by batch or heads, or replicated."""
    operators = torch.ops.fusewise
    for count, op in ((1, operators.rope), (2, operators.rope_qk)):
        register_sharding(op.default)(functools.partial(_placements, count, count))
    for count, op in ((1, operators.rope_), (2, operators.rope_qk_)):
        register_sharding(op.default)(functools.partial(_placements, count, 0))


def _placements(count: int, outputs: int, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """Acceptable placements, each as (placements of outputs, of arguments), for `count` rotated tensors."""
    table, sin, positions, offsets, cu_seqlens, _, text = args[count : count + 7]
    spec = Spec.decode(text)
    batch, _, heads = layout_dims(spec.layout)
    rest = len(args) - count - 5  # offset, spec, impl, strides: not tensors

    def arguments(x: Any, of_table: Any, of_positions: Any, of_offsets: Any) -> list[Any]:
        tables = [of_table, None if sin is None else of_table]
        indices = [None if positions is None else of_positions, None if offsets is None else of_offsets]
        bounds = [None if cu_seqlens is None else Replicate()]
        return [x] * count + tables + indices + bounds + [None] * rest

    everywhere: Any = Replicate()
    acceptable: list[tuple[list[Any], list[Any]]] = [
        ([everywhere] * outputs, arguments(everywhere, everywhere, everywhere, everywhere))
    ]
    acceptable.append(([Shard(heads)] * outputs, arguments(Shard(heads), everywhere, everywhere, everywhere)))
    if batch is not None:
        batched_table = len(table.shape) == 3 and table.shape[0] > 1
        position_dims = 0 if positions is None else len(positions.shape)
        axis = 0 if spec.sections is None else 1
        batched_positions = position_dims == axis + 2 and positions.shape[axis] > 1
        acceptable.append(
            (
                [Shard(batch)] * outputs,
                arguments(
                    Shard(batch),
                    Shard(0) if batched_table else everywhere,
                    Shard(axis) if batched_positions else everywhere,
                    Shard(0),
                ),
            )
        )
    return acceptable
