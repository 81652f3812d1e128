"""vLLM's names of the plain all-reduce, over the kernels of `allreduce_fusion`.

Ranks push their data into receive buffers, so that no input needs to be registered. The buffers are
made for the group and the size of the shared buffer that `vllm_init_custom_ar` is given.
"""

from __future__ import annotations

import itertools

import torch

from .._common import checks
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..jit.comm import check_ranks, gen_all_reduce_module
from ..jit.core import JitSpec
from . import all_reduce_call, cuda_ipc
from . import schedule as schedules
from .peer_workspace import PeerWorkspace

_META_BYTES = 256


class _Handle:
    """An open group, with the address of this rank's registered buffer."""

    def __init__(self, buffers: cuda_ipc.SharedBuffers) -> None:
        self.max_bytes = buffers.size - _META_BYTES
        ranks = len(buffers.pointers)
        check_ranks(ranks)
        self.peers = PeerWorkspace(schedules.half_bytes(self.max_bytes, ranks), buffers.backend)
        self.registered = 0


_numbers = itertools.count(1)
_handles: dict[int, _Handle] = {}


def _opened(fa: int) -> _Handle:
    if fa not in _handles:
        raise ValueError(f"`fa` must be an open handle of vllm_init_custom_ar, got {fa!r}")
    return _handles[fa]


def vllm_meta_size() -> int:
    """Bytes before the data of the buffer that `vllm_init_custom_ar` takes."""
    return _META_BYTES


def vllm_init_custom_ar(
    ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool
) -> int:
    """Open the all-reduce of a group. Collective.

    Parameters
    ----------
    ipc_tensors : list of int
        Addresses of `create_shared_buffer` with ``vllm_meta_size()`` bytes and those of the largest
        tensor: they say which ranks, 2 to 16, take part.
    rank_data : torch.Tensor
        On the GPU. Nothing is written to it: inputs are not registered.
    rank : int
        This process's place in the group.
    full_nvlink : bool
        Peer memory serves over NVLink and PCIe alike.

    Returns
    -------
    int
        The handle, for the other functions.

    Raises
    ------
    ValueError
        If the addresses are of no open buffer of this rank, or it has no room for data.
    """
    checks.cuda_tensors(rank_data=rank_data)
    checks.flag("full_nvlink", full_nvlink)
    checks.count("rank", rank, 0, max(0, len(ipc_tensors) - 1))
    buffers = cuda_ipc.created("ipc_tensors", ipc_tensors, rank)
    if buffers.size <= _META_BYTES:
        raise ValueError(
            f"`ipc_tensors` must have more than {_META_BYTES} bytes, vllm_meta_size() and the "
            f"largest tensor, got {buffers.size}"
        )
    number = next(_numbers)
    _handles[number] = _Handle(buffers)
    return number


def vllm_dispose(fa: int) -> None:
    """Free what `vllm_init_custom_ar` opened. Collective. Raises a ValueError if it is not open."""
    _opened(fa).peers.close()
    del _handles[fa]


def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Remember the addresses of a shared buffer, which calls may then name as `reg_buffer`.

    Raises
    ------
    ValueError
        If the handle is not open, or there is not one address for each rank.
    """
    handle = _opened(fa)
    if len(fake_ipc_ptrs) != handle.peers.world_size:
        raise ValueError(
            f"`fake_ipc_ptrs` must be {handle.peers.world_size} addresses, got {len(fake_ipc_ptrs)}"
        )
    handle.registered = fake_ipc_ptrs[handle.peers.rank]


def vllm_get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """Handles and offsets of buffers that a captured graph needs registered: none, two empty lists.

    Raises a ValueError if the handle is not open.
    """
    _opened(fa)
    return [], []


def vllm_register_graph_buffers(
    fa: int, handles: list[list[int]], offsets: list[list[int]]
) -> None:
    """Take what `vllm_get_graph_buffer_ipc_meta` returned on each rank: empty lists.

    Raises
    ------
    ValueError
        If the handle is not open, or there is anything to register.
    """
    _opened(fa)
    for name, lists in (("handles", handles), ("offsets", offsets)):
        if any(lists):
            raise ValueError(
                f"`{name}` must be the empty lists of vllm_get_graph_buffer_ipc_meta, got {lists}"
            )


_NAMES = {"input": "inp", "output": "out", "workspace": "fa"}


@graph_operator("out")
@flashinfer_api
def vllm_all_reduce(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    reg_buffer_sz_bytes: int,
    num_ctas: int,
) -> None:
    """Sum a tensor over the ranks. Collective; in captured graphs, too.

    Parameters
    ----------
    fa : int
        The handle that `vllm_init_custom_ar` returned.
    inp, out : torch.Tensor
        Same shape and dtype, contiguous, float16, bfloat16 or float32, whole 16 bytes; `out` may be
        `inp`. `out` gets the sum in float32 in the order of the ranks, rounded once.
    reg_buffer : int
        0, or this rank's address of `vllm_register_buffer`; nothing is copied there.
    reg_buffer_sz_bytes : int
        With a `reg_buffer`, the most bytes that `inp` may have.
    num_ctas : int
        Most CTAs of the grid, alike on all ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call of the group has timed out.
    """
    handle = _opened(fa)
    checks.tensors(inp=inp, out=out)
    size = inp.numel() * inp.element_size()
    most = handle.max_bytes
    if reg_buffer:
        if reg_buffer != handle.registered:
            raise ValueError("`reg_buffer` must be 0, or this rank's of vllm_register_buffer")
        most = min(most, reg_buffer_sz_bytes)
    if size > most:
        raise ValueError(f"`inp` must have at most {most} bytes, got {size}")
    peers = handle.peers
    schedule = schedules.flat_schedule(
        size,
        schedules.takes_one_shot(size, peers.world_size),
        peers.world_size,
        peers.max_ctas,
        peers.is_shared_device,
    )
    ctas = min(schedule.num_ctas, checks.count("num_ctas", num_ctas, 1, 65535))
    schedule = schedule._replace(num_ctas=ctas)
    all_reduce_call.run(peers, inp, out, schedule=schedule, names=_NAMES)


def gen_vllm_comm_module() -> JitSpec:
    """FlashInfer's name of the all-reduce: `gen_all_reduce_module`, of two ranks."""
    return gen_all_reduce_module()


init_custom_ar = vllm_init_custom_ar
dispose = vllm_dispose
all_reduce = vllm_all_reduce
register_buffer = vllm_register_buffer
register_graph_buffers = vllm_register_graph_buffers
get_graph_buffer_ipc_meta = vllm_get_graph_buffer_ipc_meta
meta_size = vllm_meta_size
