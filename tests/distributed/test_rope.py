"""RoPE on DTensors: two processes, each rotating its shard, match a single process."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")


def _rank(rank: int, port: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    import fusewise
    from fusewise.distributed import register_sharding_rules

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    register_sharding_rules()
    register_sharding_rules()  # calling it twice is harmless
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 6, heads, 16, generator=generator) for heads in (8, 2))
    gq, gk = torch.randn(q.shape, generator=generator), torch.randn(k.shape, generator=generator)
    inv_freq = torch.rand(8, generator=generator)
    positions = torch.randint(0, 50, (4, 6), generator=generator)
    table = torch.rand(4, 6, 8, generator=generator)
    whole = [Replicate()]
    for placement in (Shard(0), Shard(2), Replicate()):
        for arguments in ({"inv_freq": inv_freq, "positions": positions}, {"cos": table, "sin": table.flip(-1)}):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            expected = fusewise.rope(*leaves, **arguments)
            expected_gradients = torch.autograd.grad(expected, leaves, (gq, gk))

            sharded = {name: distribute_tensor(x, mesh, whole) for name, x in arguments.items()}
            leaves = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in (q, k)]
            out = fusewise.rope(*leaves, **sharded)
            upstream = [distribute_tensor(g, mesh, [placement]) for g in (gq, gk)]
            gradients = torch.autograd.grad(out, leaves, upstream)
            for got, want in zip((*out, *gradients), (*expected, *expected_gradients), strict=True):
                assert got.placements == (placement,)
                assert got.to_local().is_contiguous()
                assert torch.equal(got.full_tensor(), want)

            in_place = distribute_tensor(q.clone(), mesh, [placement])
            fusewise.rope_(in_place, **sharded)
            assert torch.equal(in_place.full_tensor(), expected[0])
    # q and k with different placements: out of place one is redistributed, in place neither may be.
    expected = fusewise.rope(q, k, inv_freq=inv_freq)
    for placements in ((Replicate(), Shard(2)), (Shard(0), Replicate()), (Shard(2), Replicate()), (Shard(0), Shard(2))):
        pair = [distribute_tensor(x.clone(), mesh, [p]) for x, p in zip((q, k), placements, strict=True)]
        frequencies = distribute_tensor(inv_freq, mesh, whole)
        for got, want in zip(fusewise.rope(*pair, inv_freq=frequencies), expected, strict=True):
            assert torch.equal(got.full_tensor(), want)
        fusewise.rope_(*pair, inv_freq=frequencies)
        for got, want, placement in zip(pair, expected, placements, strict=True):
            assert got.placements == (placement,)
            assert torch.equal(got.full_tensor(), want)
    dist.barrier()
    # Skips the shutdown of the interpreter and the backend, whose threads have been seen to abort a process at its end.
    os._exit(0)


def test_shards_of_batch_and_heads_rotate_like_the_whole() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port,), nprocs=2)
