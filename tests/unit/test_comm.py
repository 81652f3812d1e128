"""Communication without a GPU: groups, sizes, schedules, the struct, refusals."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashinfer import comm
from flashinfer.comm import mnnvl, schedule
from flashinfer.comm.comm_backend import ThreadBackend, TorchDistBackend
from flashinfer.comm.peer_workspace import CommWorkspace, Failure, agree
from flashinfer.compat.backends import BackendSupportedError
from flashinfer.jit.comm import AllReduceConfig

ROOT = Path(__file__).resolve().parents[2]


def run_threads(world_size: int, body) -> list:
    backends = ThreadBackend.create(world_size, timeout=10)
    results: list = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = body(backends[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def exercise(backend) -> tuple:
    """Every method of the interface."""
    rank = backend.Get_rank()
    backend.barrier()
    part = backend.Split(rank % 2, -rank)
    return (
        backend.Get_size(),
        backend.allgather({"rank": rank}),
        backend.bcast(f"from {rank}", 1),
        part.Get_size(),
        tuple(part.allgather(rank)),
    )


def expected(rank: int, world_size: int) -> tuple:
    everyone = tuple({"rank": r} for r in range(world_size))
    part = tuple(r for r in reversed(range(world_size)) if r % 2 == rank % 2)
    return world_size, everyone, "from 1", len(part), part


def test_threads_are_a_group():
    for rank, got in enumerate(run_threads(4, exercise)):
        assert got == expected(rank, 4)


def _process(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    got = exercise(TorchDistBackend())
    # Groups of torch.distributed keep the order of the ranks.
    assert got == expected(rank, 2)
    with pytest.raises(ValueError, match=r"`dtype` is \['a', 'b'\] by rank"):
        agree(TorchDistBackend(dist.group.WORLD), "f", {"dtype": "ab"[rank], "same": 1})
    dist.destroy_process_group()


def test_processes_are_a_group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_process, (port,), nprocs=2, start_method="fork")


def test_a_group_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        TorchDistBackend()


def test_ranks_that_disagree_are_all_told():
    def body(backend):
        agree(backend, "f", {"size": 3 + (backend.Get_rank() == 2), "other": 1})

    for error in run_threads(3, body):
        assert isinstance(error, ValueError)
        assert str(error) == "f must be called alike by all ranks: `size` is [3, 3, 4] by rank"


def test_ranks_agree_or_do_not():
    assert run_threads(2, lambda b: mnnvl.all_ranks_agree(b, True)) == [True, True]
    assert run_threads(2, lambda b: mnnvl.all_ranks_agree(b, b.Get_rank() == 0)) == [False, False]
    assert mnnvl.all_ranks_support_mnnvl(False, 1) is False


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
def test_every_call_that_fits_has_room(world_size):
    """The room that a call of the binding needs, by the formulas of docs/comm.md."""
    for num_bytes in (16, 4096, 1 << 20, 32 << 20):
        half = schedule.half_bytes(num_bytes, world_size)
        for row_bytes in (16, 4096, 16384):
            rows = num_bytes // row_bytes
            if rows == 0:
                continue
            owned = -(-rows // world_size) * row_bytes
            assert half >= (2 * world_size - 1) * owned
            size = rows * row_bytes
            if schedule.takes_one_shot(size, world_size):
                assert half >= (world_size - 1) * size
        forced = schedule.half_bytes(num_bytes, world_size, True)
        assert forced >= (world_size - 1) * num_bytes


@pytest.mark.parametrize("shared", [False, True])
def test_schedules_cover_their_rows(shared):
    for row_bytes in range(16, schedule.MAX_ROW_BYTES + 1, 4096 - 16):
        row_bytes -= row_bytes % 16
        for rows in (1, 7, 5000):
            cut = schedule.row_schedule(rows, row_bytes, True, 2, 16 if shared else 132, shared)
            assert cut.threads % 32 == 0 and 32 <= cut.threads <= 512
            assert cut.vecs_per_thread in (1, 2, 4)
            assert cut.threads * cut.vecs_per_thread * 16 >= row_bytes
            assert 1 <= cut.num_ctas <= rows
            assert not shared or cut.num_ctas <= 16


def test_the_struct_is_that_of_the_kernels():
    """Order and types of the fields, from the header."""
    text = (ROOT / "include/flashinfer/comm/workspace.h").read_text()
    for struct, name in ((CommWorkspace, "CommWorkspace"), (Failure, "Failure")):
        body = text.partition(f"struct {name} {{")[2].partition("};")[0]
        lines = [line.partition("//")[0].strip() for line in body.splitlines()]
        fields = [line.rstrip(";").split() for line in lines if line]
        assert [f[-1].lstrip("*").partition("[")[0] for f in fields] == [
            field[0] for field in struct._fields_
        ]
        widths = {"uint32_t": 4, "int64_t": 8}
        for (kind, *_, _last), (field, _type) in zip(fields, struct._fields_, strict=True):
            size = getattr(struct, field).size
            assert size == widths.get(kind, 8) or size == 8 * 16
    assert ctypes.sizeof(CommWorkspace) == 288


@pytest.mark.parametrize("world_size", [1, 17])
def test_numbers_of_ranks(world_size):
    with pytest.raises(ValueError, match="`world_size` must be from 2 to 16"):
        AllReduceConfig(torch.bfloat16, world_size)
    with pytest.raises(ValueError, match="`world_size` must be from 2 to 16"):
        comm.create_allreduce_fusion_workspace(
            "auto", world_size, 0, 8, 64, torch.bfloat16, comm_backend=ThreadBackend.create(1)[0]
        )


@pytest.mark.parametrize("backend", ["mnnvl", "mnnvl-cutedsl"])
def test_backends_of_multicast_are_refused_by_name(backend):
    with pytest.raises(BackendSupportedError, match="needs NVLink multicast"):
        comm.create_allreduce_fusion_workspace(backend, 2, 0, 8, 64, torch.bfloat16)
    for name in ("McastGPUBuffer", "SymmDeviceMemory", "MnnvlMemory"):
        with pytest.raises(BackendSupportedError, match=f"{name} needs NVLink multicast"):
            getattr(mnnvl, name)(1, 2, 3)
    assert not mnnvl.is_multicast_supported(0) and not mnnvl.is_mnnvl_fabric_supported(0)


@pytest.mark.parametrize(
    "constant",
    [
        {"top_k": 8}, {"rms_eps": 1e-6}, {"weight_bias": 1.0}, {"routed_scaling_factor": 1.0},
        {"include_shared_expert": False}, {"add_residual": True}, {"write_residual_output": True},
        {"apply_rms_norm": True}, {"output_dtype": torch.bfloat16}, {"dynamic_fp8": False},
        {"write_norm_output": False}, {"config": {}},
    ],
    ids=lambda constant: next(iter(constant)),
)  # fmt: skip
def test_constants_of_multicast_are_refused_by_name(constant):
    name = next(iter(constant))
    with pytest.raises(ValueError, match=f"`{name}` must be None, got "):
        comm.create_allreduce_fusion_workspace("auto", 2, 0, 8, 64, torch.bfloat16, **constant)


def test_a_host_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="`gpus_per_node` must be at least `world_size`, 4, got 2"):
        comm.create_allreduce_fusion_workspace("auto", 4, 0, 8, 64, torch.bfloat16, 2)


def test_mapping_places_ranks():
    mapping = comm.Mapping(16, 13, 8, tp_size=4, cp_size=2, pp_size=2, moe_ep_size=2)
    assert (mapping.tp_rank, mapping.cp_rank, mapping.pp_rank) == (1, 1, 1)
    assert mapping.tp_group == [12, 13, 14, 15]
    assert mapping.cp_group == [9, 13]
    assert mapping.pp_group == [5, 13]
    assert (mapping.moe_tp_size, mapping.moe_ep_rank, mapping.moe_tp_rank) == (2, 1, 0)
    assert mapping.moe_ep_group == [12, 13] and mapping.moe_tp_group == [13, 15]
    assert mapping.ep_experts(8) == [4, 5, 6, 7]
    assert (mapping.node_rank, mapping.local_rank) == (1, 5) and mapping.is_multi_node()
    assert mapping.is_last_pp_rank() and mapping.prev_pp_rank() == 5
    assert mapping.pp_layers(5) == [3, 4]
    assert comm.Mapping.from_dict(mapping.to_dict()) == mapping
    with pytest.raises(ValueError, match="`world_size` must be the product of its parts, 2, got 4"):
        comm.Mapping(4, 0, tp_size=2)
    with pytest.raises(ValueError, match="`rank` must be from 0 to 1, got 2"):
        comm.Mapping(2, 2, tp_size=2)


def test_sizes_of_swizzled_scales():
    assert comm.compute_fp4_swizzled_layout_sf_size(130, 5) == 256 * 8
