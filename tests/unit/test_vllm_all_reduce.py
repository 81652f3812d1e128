"""vLLM's names of the all-reduce without a GPU: handles, sizes, refusals, the grid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashinfer import comm
from flashinfer._common import checks
from flashinfer.comm import cuda_ipc, vllm_ar


class Peers:
    """A workspace that records what is launched."""

    rank, world_size, max_ctas, is_shared_device = 1, 2, 132, False

    def __init__(self, half_bytes, backend):
        self.half_bytes, self.is_open = half_bytes, True

    def close(self):
        self.is_open = False


@pytest.fixture
def handle(monkeypatch):
    monkeypatch.setattr(vllm_ar, "PeerWorkspace", Peers)
    monkeypatch.setattr(checks, "cuda_tensors", lambda **tensors: None)
    buffers = SimpleNamespace(size=comm.vllm_meta_size() + 4096, backend=None, pointers=[16, 32])
    monkeypatch.setitem(cuda_ipc._created, 32, buffers)
    number = comm.vllm_init_custom_ar([16, 32], torch.empty(1), 1, True)
    yield number
    vllm_ar._handles.pop(number, None)


def test_sizes_and_the_grid(handle, monkeypatch):
    calls = []
    monkeypatch.setattr(
        vllm_ar.all_reduce_call, "run", lambda *args, schedule, names: calls.append(schedule)
    )
    x = torch.empty(2048, dtype=torch.bfloat16)
    comm.vllm_all_reduce(handle, x, x, 0, 0, 1)
    comm.vllm_register_buffer(handle, [64, 96])
    comm.vllm_all_reduce(handle, x, x, 96, 4096, 36)
    assert [schedule.num_ctas for schedule in calls] == [1, 2]
    with pytest.raises(ValueError, match="`inp` must have at most 4094 bytes, got 4096"):
        comm.vllm_all_reduce(handle, x, x, 96, 4094, 36)
    with pytest.raises(ValueError, match="`inp` must have at most 4096 bytes, got 8192"):
        comm.vllm_all_reduce(handle, x.float(), x, 0, 0, 36)
    with pytest.raises(ValueError, match="`num_ctas`"):
        comm.vllm_all_reduce(handle, x, x, 0, 0, 0)


def test_handles(handle):
    assert comm.vllm_get_graph_buffer_ipc_meta(handle) == ([], [])
    comm.vllm_register_graph_buffers(handle, [[], []], [[], []])
    with pytest.raises(ValueError, match="`offsets` must be the empty lists"):
        comm.vllm_register_graph_buffers(handle, [[], []], [[0], []])
    with pytest.raises(ValueError, match="`fake_ipc_ptrs` must be 2 addresses, got 1"):
        comm.vllm_register_buffer(handle, [64])
    with pytest.raises(ValueError, match="`ipc_tensors` are of no open buffer"):
        comm.vllm_init_custom_ar([16, 48], torch.empty(1), 1, True)
    peers = vllm_ar._handles[handle].peers
    comm.vllm_dispose(handle)
    assert not peers.is_open
    with pytest.raises(ValueError, match="`fa` must be an open handle"):
        comm.vllm_dispose(handle)
