"""The gated linear unit on two processes: DTensors sharded by rows and by features, and FSDP's resharded weights."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")


def _start(rank: int, port: int) -> Any:
    from torch.distributed.tensor import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return init_device_mesh("cpu", (2,))


def _both(rank: int, port: int) -> None:
    mesh = _start(rank, port)
    _fsdp(rank, mesh)  # which needs none of the rules that the other registers
    _shards(mesh)
    dist.barrier()
    # Skips the shutdown of the interpreter and the backend, whose threads have been seen to abort a process at its end.
    os._exit(0)


def _shards(mesh: Any) -> None:
    """Shards of rows and of features compute like the whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from fusewise import gated_linear, gated_mlp, geglu_linear
    from fusewise.compat.liger import LigerSiLUMulFunction
    from fusewise.distributed import register_sharding_rules

    register_sharding_rules()
    register_sharding_rules()  # calling it twice is harmless
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, value, gate, b_value, b_gate, down = (
        randn(4, 6, 16),
        randn(8, 16),
        randn(8, 16),
        randn(8),
        randn(8),
        randn(12, 8),
    )
    stacked = (x, torch.cat((value, gate)), torch.cat((b_value, b_gate)))
    turns = (x, torch.stack((value, gate), 1).view(16, 16), torch.stack((b_value, b_gate), 1).view(16))
    two = (x, value, gate, b_value, b_gate)

    def of_two(x: Tensor, w: Tensor, w_gate: Tensor, b: Tensor, b_gate: Tensor, **options: Any) -> Tensor:
        return gated_linear(x, w, b, w_gate=w_gate, b_gate=b_gate, activation="silu", **options)

    def in_turn(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
        return gated_linear(x, w, b, activation="relu", layout="interleaved", **options)

    def mlp(x: Tensor, w: Tensor, w_gate: Tensor, w_down: Tensor, **options: Any) -> Tensor:
        return gated_mlp(x, w_gate, w, w_down, activation="gelu", **options)

    def mlp_in_turn(x: Tensor, w: Tensor, b: Tensor, w_down: Tensor, **options: Any) -> Tensor:
        return gated_mlp(x, w, None, w_down, b_gate=b, activation="silu", layout="interleaved", **options)

    def act(x: Tensor, y: Tensor, **_: Any) -> Tensor:
        z: Tensor = LigerSiLUMulFunction.apply(x, y)
        return z

    whole, rows, columns = Replicate(), Shard(0), Shard(2)
    # Function, tensors, their placements, placement of the result.
    cases: list[tuple[Any, tuple[Tensor, ...], tuple[Any, ...], Any]] = [
        (of_two, two, (rows, whole, whole, whole, whole), rows),
        (of_two, two, (whole, rows, rows, rows, rows), columns),
        (geglu_linear, stacked, (rows, whole, whole), rows),
        (geglu_linear, stacked, (whole, whole, whole), whole),
        (geglu_linear, stacked, (whole, rows, rows), whole),  # gathered: a rank would only have features of one half
        (in_turn, turns, (rows, whole, whole), rows),
        (in_turn, turns, (whole, rows, rows), columns),
        (in_turn, (x, turns[1].view(8, 2, 16)), (whole, rows), columns),
        # gathered: nine pairs of rows and their bias do not split alike
        (in_turn, (x, randn(9, 2, 16), randn(18)), (whole, rows, rows), whole),
        (in_turn, (x, randn(18, 16), randn(18)), (whole, rows, rows), whole),  # a shard ends within a pair
        # nor does their gradient, of a down projection whose nine columns are sharded
        (mlp_in_turn, (x, randn(18, 16), randn(18), randn(12, 9)), (whole, rows, rows, Shard(1)), None),
        (mlp, (x, value, gate, down), (rows, whole, whole, whole), rows),
        (mlp, (x, value, gate, down), (whole, rows, rows, Shard(1)), None),  # a pending sum
        (act, (x, randn(4, 6, 16)), (columns, columns), columns),
        (act, (x, randn(4, 6, 16)), (rows, rows), rows),
    ]
    for function, tensors, placements, placed in cases:
        for save in ("preact", "input"):
            leaves = [t.clone().requires_grad_() for t in tensors]
            expected = function(*leaves, save=save)
            dy = torch.randn(expected.shape, generator=generator)
            gradients = torch.autograd.grad(expected, leaves, dy)

            leaves = [
                distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, placements, strict=True)
            ]
            found = function(*leaves, save=save)
            name = f"{function.__name__} {placements} {save}"
            assert found.placements == (placed,) or (placed is None and found.placements[0].is_partial()), name
            upstream = distribute_tensor(dy, mesh, [whole if placed is None else placed])
            sharded = torch.autograd.grad(found, leaves, upstream)
            for got, want in zip((found, *sharded), (expected, *gradients), strict=True):
                torch.testing.assert_close(
                    got.full_tensor(), want, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


class _Block(nn.Module):
    """Two gated MLPs and a bare gated linear unit, with a residual."""

    def __init__(self, save: Any) -> None:
        from fusewise.nn import GatedLinear, GatedMLP

        super().__init__()
        self.first = GatedMLP(16, 24, bias=True, activation="silu", save=save)
        self.second = GatedMLP(16, 20, activation="gelu_tanh", save=save)
        self.unit = GatedLinear(16, 16, activation="gelu", save=save)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.second(x)
        out: Tensor = self.unit(x)
        return out


def _fsdp(rank: int, mesh: Any) -> None:
    """Modules under FSDP and under tensor parallelism train like the whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for save in ("preact", "input"):
        for every_projection in (False, True):
            torch.manual_seed(1)
            usual = _Block(save)
            sharded = copy.deepcopy(usual)
            projections = [m for m in sharded.modules() if isinstance(m, nn.Linear)] if every_projection else []
            for module in (*projections, sharded.first, sharded.second, sharded.unit, sharded):
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (usual, sharded)]
            losses: list[list[float]] = [[], []]
            for step in range(3):
                batch = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
                for index, (module, optimizer) in enumerate(zip((usual, sharded), optimizers, strict=True)):
                    optimizer.zero_grad()
                    # Each rank has one half of the batch; FSDP averages the gradients.
                    loss = module(batch if index == 0 else batch[rank]).square().mean()
                    loss.backward()
                    optimizer.step()
                    value = loss.detach().clone()
                    if index == 1:
                        dist.all_reduce(value)
                        value /= 2
                    losses[index].append(float(value))
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
            for name, parameter in sharded.named_parameters():
                torch.testing.assert_close(
                    parameter.full_tensor(), dict(usual.named_parameters())[name], rtol=1e-4, atol=1e-5
                )

    torch.manual_seed(2)
    usual = _Block("preact").first
    parallel = copy.deepcopy(usual)
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(parallel, mesh, plan)
    x = torch.randn(5, 16)
    dist.broadcast(x, 0)
    torch.testing.assert_close(parallel(x), usual(x), rtol=1e-4, atol=1e-5)
    parallel(x).sum().backward()
    usual(x).sum().backward()
    torch.testing.assert_close(parallel.gate_proj.weight.grad.full_tensor(), usual.gate_proj.weight.grad)


def test_two_processes_compute_and_train_like_one() -> None:
    """In one test, since starting two processes takes most of its time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_both, args=(port,), nprocs=2)
