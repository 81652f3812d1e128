"""Context parallelism without a GPU: over gloo, and what is decided and refused."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashinfer import comm
from flashinfer.comm import UlyssesRankTopology, decide_ulysses_backend
from tests.comm.ranks import numbers

RANKS, BATCH, SEQ, HEADS, DIM = 2, 2, 3, 4, 8


def _exchange(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    shape = BATCH, SEQ, HEADS, DIM
    parts = [numbers(*shape, dtype=torch.float32, seed=r) for r in range(RANKS)]
    whole, own = torch.cat(parts, 1), slice(2 * rank, 2 * rank + 2)
    ulysses = comm.UlyssesCommunicator(
        max_elems=3 * parts[0].numel(), dtype=torch.float32, backend="nccl"
    )
    assert ulysses.backend == "nccl" and ulysses.decision.reason == "asked for"
    scattered = ulysses.scatter_heads(parts[rank])
    assert torch.equal(scattered, whole[:, :, own])
    assert torch.equal(ulysses.gather_heads(scattered), parts[rank])
    out = torch.zeros(shape)
    for offset in range(2):
        band = scattered[:, :, offset : offset + 1].contiguous()
        ulysses.gather_output_head_chunk(band, local_heads=2, head_offset=offset, out=out)
    assert torch.equal(out, parts[rank])
    packed = ulysses.scatter_qkv_head_chunk(
        parts[rank], 2 * parts[rank], 3 * parts[rank], head_offset=1, head_count=1
    )
    expected = torch.cat([whole, 2 * whole, 3 * whole], -1)[:, :, 2 * rank + 1 : 2 * rank + 2]
    assert torch.equal(packed, expected)
    with pytest.raises(ValueError, match="`x` must have a multiple of 2 heads, got 3"):
        ulysses.scatter_heads(torch.zeros(1, 1, 3, 4))
    with pytest.raises(ValueError, match="`x` must have at most"):
        ulysses.scatter_heads(torch.zeros(64, 3, 4, 8))
    ulysses.close()
    with pytest.raises(ValueError, match="closed"):
        ulysses.scatter_heads(parts[rank])
    dist.destroy_process_group()


def test_parts_of_sequences_over_gloo():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_exchange, (port,), nprocs=RANKS)


def test_bands_of_heads_are_packed_and_merged():
    q, k, v = (numbers(2, 3, 6, 4, dtype=torch.float16, seed=i) for i in range(3))
    packed = comm.pack_ulysses_qkv_head_chunk(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
        world_size=2, head_offset=1, head_count=2,
    )  # fmt: skip
    expected = torch.cat([q, k, v], -1).transpose(0, 1)[:, :, [1, 2, 4, 5]]
    assert torch.equal(packed, expected)
    out = torch.zeros_like(q)
    comm.merge_ulysses_output_head_chunk(
        q[:, :, [1, 2, 4, 5]], world_size=2, local_heads=3, head_offset=1, out=out
    )
    assert torch.equal(out[:, :, [1, 2, 4, 5]], q[:, :, [1, 2, 4, 5]])
    assert not out[:, :, [0, 3]].any()
    with pytest.raises(ValueError, match="`head_offset` . `head_count` must be at most 3"):
        comm.pack_ulysses_qkv_head_chunk(q, k, v, world_size=2, head_offset=2, head_count=2)


def topology(host: str, device: str, peers: str, visible: str) -> UlyssesRankTopology:
    return UlyssesRankTopology(host, device, frozenset(peers), frozenset(visible))


def test_the_way_is_chosen_from_all_ranks_alike():
    a, b = topology("h", "a", "ab", "ab"), topology("h", "b", "ab", "ab")
    alone, far = topology("h", "b", "b", "ab"), topology("i", "b", "b", "b")
    assert decide_ulysses_backend("auto", [a, b]).backend == "nvlink"
    assert decide_ulysses_backend("nccl", [a, b]).backend == "nccl"
    for other, reason in (
        (alone, "rank 1 cannot access the memory of rank 0"),
        (far, "several hosts"),
        (topology("h", "", "", ""), "a rank has no GPU"),
    ):
        decision = decide_ulysses_backend("auto", [a, other])
        assert decision.backend == "nccl" and reason in decision.reason
        with pytest.raises(comm.UlyssesBackendError, match=reason):
            decide_ulysses_backend("nvlink", [a, other])


def test_what_has_no_kernels_is_refused_with_the_way_around():
    from flashinfer.comm import trtllm_mnnvl_ar
    from flashinfer.compat.backends import BackendSupportedError

    mapping = comm.Mapping(2, 0, 2, tp_size=2)
    x = torch.zeros(2, 8)
    for multicast in (
        lambda: comm.MNNVLAllReduceFusionWorkspace(mapping),
        lambda: trtllm_mnnvl_ar.trtllm_mnnvl_allreduce(x, None, False),
        lambda: trtllm_mnnvl_ar.trtllm_mnnvl_fused_allreduce_add_rmsnorm(x, x, x, None),
        lambda: trtllm_mnnvl_ar.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(x, x, x, None),
    ):
        with pytest.raises(BackendSupportedError, match="needs NVLink multicast.*'trtllm'"):
            multicast()
    assert not comm.is_mnnvl_cutedsl_supported(2, 8, torch.bfloat16, max_token_num=8)
    for call in (
        lambda: comm.init_ulysses_a2a([1, 2], [3, 4], 0, 2, True),
        lambda: comm.dispose_ulysses_a2a(1),
    ):
        with pytest.raises(BackendSupportedError, match="take UlyssesCommunicator"):
            call()
    with pytest.raises(ValueError, match="`workspace` must be of decode_cp_a2a_allocate"):
        comm.decode_cp_a2a_init_workspace(torch.zeros(1), 0, 2)
    assert comm.decode_cp_a2a_workspace_size(2) > 0
