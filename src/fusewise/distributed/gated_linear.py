"""Sharding rules of the gated linear unit: by rows of x, or by gated features; without communication of its own.

By rows (data parallel), every rank has the whole weight, and the gradients of weight and bias are partial sums. By
features (column parallel), every rank has the same features of both halves: rows of two weights, or pairs of rows of an
interleaved one, for which F must be divisible by the number of ranks. Row shards of a stacked weight would hold
features of only one half, so these rules do not shard it: DTensor gathers it first, like all other placements.
Shape legend as in `ops.gated_linear._problem`: M rows, D features in, F features out, O out of the down projection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ..ops.gated_linear import _gate, _op
from ..ops.gated_linear._problem import Spec, features_out

# Acceptable placements, each as (placements of the outputs, placements of the arguments).
Placements = list[tuple[list[Any], list[Any]]]

EVERYWHERE: Any = Replicate()
SUM: Any = Partial()


@functools.cache
def register() -> None:
    """Let the functions of the gated linear unit accept DTensors."""
    rules: dict[Any, Callable[..., Placements]] = {
        _op.op_gated_linear: functools.partial(_forward, False),
        _op.op_gated_linear_preact: functools.partial(_forward, True),
        _op.op_grad: _gradient,
        _op.op_recompute_grad: _recompute_gradient,
        _op.op_down_grad: _down_gradient,
        _gate.op_gate: _elementwise,
        _gate.op_gate_grad: _elementwise_gradient,
    }
    for op, rule in rules.items():
        register_sharding(op)(rule)
        _hash_all_but_tensors(op)


def _hash_all_but_tensors(op: Any) -> None:
    """Include the spec in the key of DTensor's sharding cache. `register_sharding` only hashes non-tensor arguments
    from the first int on, and these operators have none: the result for one weight layout would be reused for all."""
    first = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "spec")
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[op] = RuntimeSchemaInfo(first, needs_pytree=True)


def _preact(spec: Spec, dim: int) -> Any:
    """The placement of the pre-activations, (M, 2F) or (2, M, F), if a matrix (M, F) is sharded along `dim`."""
    return Shard(dim if spec.fused else dim + 1)


def _by_features(spec: Spec, hidden: int, mesh: Any) -> bool:
    """Whether a shard of the rows of the weight, or of its gradient, holds the same ones of F = `hidden` features of both
    halves."""
    if spec.layout == "interleaved":
        return bool(hidden % mesh.size() == 0)
    return not spec.fused


def _weights(of: Any, weights: tuple[Any, ...]) -> list[Any]:
    return [None if weight is None else of for weight in weights]


def _forward(keeps: bool, x: Any, *rest: Any) -> Placements:
    weights, spec = rest[:4], Spec.decode(rest[4])
    acceptable: Placements = [
        ([EVERYWHERE] * (1 + keeps), [EVERYWHERE, *_weights(EVERYWHERE, weights), None, None]),
        ([Shard(0), _preact(spec, 0)][: 1 + keeps], [Shard(0), *_weights(EVERYWHERE, weights), None, None]),
    ]
    if _by_features(spec, features_out(*weights[:2]), x.mesh):
        of_y = [Shard(1), _preact(spec, 1)][: 1 + keeps]
        acceptable.append((of_y, [EVERYWHERE, *_weights(Shard(0), weights), None, None]))
    return acceptable


def _of_bias(wanted: bool, placement: Any) -> Any:
    """The placement of the (2, F) bias gradient, which is empty if not wanted."""
    return placement if wanted else EVERYWHERE


def _gradient(dy: Any, preact: Any, text: str, impl: str, bias: bool) -> Placements:
    spec = Spec.decode(text)
    ways = [(EVERYWHERE, EVERYWHERE, EVERYWHERE), (Shard(0), _preact(spec, 0), SUM)]
    if _by_features(spec, dy.shape[1], dy.mesh):
        ways.append((Shard(1), _preact(spec, 1), Shard(1)))
    return [
        ([of_preact, _of_bias(bias, of_bias)], [of_dy, of_preact, None, None, None])
        for of_dy, of_preact, of_bias in ways
    ]


def _recompute_gradient(dy: Any, x: Any, *rest: Any) -> Placements:
    weights, spec, bias = rest[:4], Spec.decode(rest[4]), rest[6]
    whole, none = _weights(EVERYWHERE, weights), [None, None, None]
    acceptable: Placements = [
        ([EVERYWHERE, EVERYWHERE], [EVERYWHERE, EVERYWHERE, *whole, *none]),
        ([_preact(spec, 0), _of_bias(bias, SUM)], [Shard(0), Shard(0), *whole, *none]),
    ]
    if _by_features(spec, dy.shape[1], dy.mesh):
        of_outputs = [_preact(spec, 1), _of_bias(bias, Shard(1))]
        acceptable.append((of_outputs, [Shard(1), EVERYWHERE, *_weights(Shard(0), weights), *none]))
    return acceptable


def _down_gradient(dz: Any, w_down: Any, preact: Any, text: str, impl: str, bias: bool) -> Placements:
    spec = Spec.decode(text)
    ways = [
        (EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE),
        (Shard(0), EVERYWHERE, _preact(spec, 0), Shard(0), SUM),
    ]
    if _by_features(spec, w_down.shape[1], w_down.mesh):
        ways.append((EVERYWHERE, Shard(1), _preact(spec, 1), Shard(1), Shard(1)))
    return [
        ([of_y, of_preact, _of_bias(bias, of_bias)], [of_dz, of_down, of_preact, None, None, None])
        for of_dz, of_down, of_preact, of_y, of_bias in ways
    ]


def _ways_of_gate(second: Any) -> list[Any]:
    """Placements of elementwise operators: by rows, and by features if value and gate are two tensors."""
    return [EVERYWHERE, Shard(0)] if second is None else [EVERYWHERE, Shard(0), Shard(1)]


def _elementwise(first: Any, second: Any, text: str, impl: str) -> Placements:
    return [([way], [way, None if second is None else way, None, None]) for way in _ways_of_gate(second)]


def _elementwise_gradient(dy: Any, first: Any, second: Any, text: str, impl: str) -> Placements:
    return [
        ([way, EVERYWHERE if second is None else way], [way, way, None if second is None else way, None, None])
        for way in _ways_of_gate(second)
    ]
