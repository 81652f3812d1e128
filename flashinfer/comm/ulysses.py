"""Ulysses sequence parallelism: parts of a sequence become parts of the heads, and back."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .._common import checks
from .._common.dtypes import FLOAT
from ..compat.backends import BackendSupportedError
from ..jit.comm import gen_exchange_module
from ..jit.core import JitSpec
from . import exchange_call, head_exchange
from .comm_backend import resolve_backend
from .peer_workspace import PeerWorkspace, agree
from .ulysses_head_chunk import check_band, pack_ulysses_qkv_head_chunk
from .ulysses_topology import UlyssesBackendDecision, resolve_ulysses_backend


class UlyssesWorkspace:
    """Staging buffers of the NCCL way, which calls may share; peer memory needs none.

    `max_elems` elements of `dtype` on `device` each.
    """

    def __init__(self, *, max_elems: int, dtype: torch.dtype, device: Any | None = None) -> None:
        checks.count("max_elems", max_elems)
        checks.dtype("dtype", dtype, FLOAT)
        buffers = torch.empty(
            2, max_elems, dtype=dtype, device="cuda" if device is None else device
        )
        self._send, self._receive = buffers[0], buffers[1]

    @property
    def send_buffer(self) -> torch.Tensor:
        """Elements to send, rank by rank."""
        return self._send

    @property
    def recv_buffer(self) -> torch.Tensor:
        """Received elements, rank by rank."""
        return self._receive


class UlyssesCommunicator:
    """Exchanges ``[B, S, H, D]`` between parts of a sequence and parts of the heads.

    Creation, every exchange and :meth:`close` are collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or CommBackend, optional
        The ranks; None: all processes.
    max_elems : int
        Elements of the largest tensor that a rank gives.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    backend : str
        ``"nvlink"``: one kernel over peer memory, which transposes on the way; ``"nccl"``:
        ``torch.distributed``; ``"auto"``: what `decide_ulysses_backend` says.
    device : torch.device, optional
        The current GPU.

    Attributes
    ----------
    decision : UlyssesBackendDecision
        The backend, and why.

    Raises
    ------
    UlyssesBackendError
        If ``"nvlink"`` is asked for and cannot serve.
    ValueError
        If the ranks give different arguments.
    """

    def __init__(
        self,
        group: Any | None = None,
        *,
        max_elems: int,
        dtype: torch.dtype,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
    ) -> None:
        self._max_elems = checks.count("max_elems", max_elems)
        self._dtype = checks.dtype("dtype", dtype, FLOAT)
        self._group = group
        ranks = resolve_backend(None, group)
        self.rank, self.world_size = ranks.Get_rank(), ranks.Get_size()
        facts = {"max_elems": max_elems, "dtype": str(dtype), "backend": backend}
        agree(ranks, "UlyssesCommunicator", facts)
        self.decision: UlyssesBackendDecision = resolve_ulysses_backend(backend, ranks, device)
        self._peers: PeerWorkspace | None = None
        if self.decision.backend == "nvlink":
            exchange_call.load(dtype, self.world_size)
            block = -(-max_elems // self.world_size) * dtype.itemsize
            self._peers = PeerWorkspace((self.world_size - 1) * block + 512, ranks)
        self._closed = False

    @property
    def backend(self) -> str:
        """ "nvlink" or "nccl"."""
        return self.decision.backend

    def set_timeout(self, seconds: float) -> None:
        """How long kernels over peer memory wait for another rank."""
        if self._peers is not None:
            self._peers.set_timeout(seconds)

    def close(self) -> None:
        """Free the memory. Collective; a second call does nothing."""
        self._closed = True
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def create_workspace(self, *, max_elems: int | None = None) -> UlyssesWorkspace:
        """Staging buffers for calls over NCCL; None: of the communicator's size."""
        return UlyssesWorkspace(max_elems=max_elems or self._max_elems, dtype=self._dtype)

    def scatter_heads(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """``[B, S_local, H, D]`` to ``[B, S_local * world_size, H / world_size, D]``.

        `x` is contiguous, of the communicator's dtype, the same shape on all ranks; `out` as well,
        None: made. Raises a ValueError if an argument is not allowed, before anything is sent.
        """
        batch, seq, heads, dim = self._checked("x", x)
        world_size = self.world_size
        if heads % world_size:
            raise ValueError(f"`x` must have a multiple of {world_size} heads, got {heads}")
        out = exchange_call.output(
            "out", out, (batch, seq * world_size, heads // world_size, dim), x
        )
        if self._peers is not None:
            head_exchange.scatter_heads(self._peers, x, out)
            return out
        parts = x.view(batch, seq, world_size, heads // world_size, dim)
        received = self._all_to_all(parts.permute(2, 0, 1, 3, 4), workspace)
        out.view(batch, world_size, seq, heads // world_size, dim).copy_(received.transpose(0, 1))
        return out

    def gather_heads(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """``[B, S_global, H_local, D]`` to ``[B, S_global / world_size, H_local * world_size, D]``.

        The inverse of `scatter_heads`, with the same rules.
        """
        batch, seq, heads, dim = self._checked("x", x)
        shape = (batch, self._local_seq(seq), heads * self.world_size, dim)
        out = exchange_call.output("out", out, shape, x)
        return self._gather(x, heads, 0, out, workspace)

    def scatter_qkv_head_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        head_offset: int,
        head_count: int,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """A band of every rank's heads of query, key and value in one exchange.

        The result is ``[B, S_global, head_count, 3 * D]``: see `pack_ulysses_qkv_head_chunk`.
        """
        packed = pack_ulysses_qkv_head_chunk(
            query,
            key,
            value,
            world_size=self.world_size,
            head_offset=head_offset,
            head_count=head_count,
        )
        return self.scatter_heads(packed, out=out, workspace=workspace)

    def gather_output_head_chunk(
        self,
        x: torch.Tensor,
        *,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """A band of heads ``[B, S_global, head_count, D]`` to where it belongs in `out`.

        `out` is ``[B, S_local, world_size * local_heads, D]``, contiguous; other heads stay.
        """
        batch, seq, heads, dim = self._checked("x", x)
        check_band("out", checks.count("local_heads", local_heads), head_offset, heads)
        shape = (batch, self._local_seq(seq), local_heads * self.world_size, dim)
        out = exchange_call.output("out", out, shape, x)
        return self._gather(x, local_heads, head_offset, out, workspace)

    def _local_seq(self, seq: int) -> int:
        if seq % self.world_size:
            raise ValueError(f"`x` must have a multiple of {self.world_size} tokens, got {seq}")
        return seq // self.world_size

    def _gather(
        self,
        x: torch.Tensor,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: UlyssesWorkspace | None,
    ) -> torch.Tensor:
        if self._peers is not None:
            head_exchange.gather_heads(self._peers, x, out, head_offset)
            return out
        parts = x.unflatten(1, (self.world_size, -1)).transpose(0, 1)
        received = self._all_to_all(parts, workspace)
        of_ranks = out.unflatten(2, (self.world_size, local_heads))
        band = of_ranks[:, :, :, head_offset : head_offset + x.shape[2]]
        band.copy_(received.permute(1, 2, 0, 3, 4))
        return out

    def _all_to_all(self, parts: torch.Tensor, workspace: UlyssesWorkspace | None) -> torch.Tensor:
        """Part r of ``[world_size, ...]`` goes to rank r, through ``torch.distributed``."""
        if workspace is None:
            send, receive = parts.contiguous(), torch.empty(parts.shape).to(parts)
        else:
            if workspace.send_buffer.numel() < parts.numel():
                raise ValueError(f"`workspace` must have {parts.numel()} elements")
            send = workspace.send_buffer[: parts.numel()].view(parts.shape)
            send.copy_(parts)
            receive = workspace.recv_buffer[: parts.numel()].view(parts.shape)
        dist.all_to_all_single(receive.view(-1), send.view(-1), group=self._group)
        return receive

    def _checked(self, name: str, x: Any) -> torch.Size:
        if self._closed:
            raise ValueError("the communicator is closed")
        checks.contiguous(name, x, 4)
        checks.dtype(name, x.dtype, (self._dtype,))
        if x.numel() > self._max_elems:
            raise ValueError(
                f"`{name}` must have at most {self._max_elems} elements, got {x.numel()}"
            )
        return x.shape


def gen_ulysses_a2a_module() -> JitSpec:
    """The module of the exchange, by default of two ranks."""
    return gen_exchange_module()


def get_ulysses_a2a_module() -> Any:
    """The loaded module of `gen_ulysses_a2a_module`."""
    return gen_ulysses_a2a_module().build_and_load()


def _refuse_addresses(*args: Any, **kwargs: Any) -> NoReturn:
    raise BackendSupportedError(
        "the functions on raw addresses cannot know the size of the memory behind them: take "
        "UlyssesCommunicator(backend='nvlink')"
    )


def init_ulysses_a2a(
    out_ipc_ptrs: list[int],
    signal_ipc_ptrs: list[int],
    rank: int,
    world_size: int,
    full_nvlink: bool,
) -> int:
    """Refused with a BackendSupportedError: take `UlyssesCommunicator`."""
    _refuse_addresses()


def ulysses_a2a(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    B: int,
    S_local: int,
    H: int,
    D: int,
    mode: int,
) -> None:
    """Refused with a BackendSupportedError: take `UlyssesCommunicator`."""
    _refuse_addresses()


def dispose_ulysses_a2a(fa: int) -> None:
    """Refused with a BackendSupportedError: take `UlyssesCommunicator`."""
    _refuse_addresses()
