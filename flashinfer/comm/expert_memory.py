"""The memory of the experts' all-to-all, and its kernels.

A rank's buffer begins with a header, places of sent tokens, gathered statistics and outputs of
experts, each where every exchange has it; received tokens end where the buffer ends. So tokens of
the next exchange do not overwrite outputs that another rank still reads.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, cast

import torch

from .._common.kernels import Kernel
from ..jit.comm import (
    ExpertCombineConfig,
    ExpertDispatchConfig,
    check_ranks,
    gen_expert_combine_module,
    gen_expert_dispatch_module,
)
from .comm_backend import TorchDistBackend
from .dlpack_utils import pack_strided_memory
from .mapping import Mapping
from .mnnvl import MnnvlConfig
from .peer_workspace import PeerWorkspace, agree

HEADER_BYTES = 256
MAX_PAYLOADS = 8


def whole(num_bytes: int) -> int:
    """Bytes with the padding after them."""
    return -(-num_bytes // 256) * 256


class Layout(NamedTuple):
    """Offsets in bytes, and what they follow from; the fields of a metainfo tensor."""

    slots: int
    gathered_stats: int
    outputs: int
    ep_size: int
    max_num_tokens: int
    num_stats: int

    @classmethod
    def of(cls, ep_size: int, max_num_tokens: int, num_stats: int) -> Layout:
        """Where the parts of fixed size end, outputs begin."""
        stats = HEADER_BYTES + whole(4 * ep_size * max_num_tokens)
        outputs = stats + whole(4 * ep_size * num_stats)
        return cls(HEADER_BYTES, stats, outputs, ep_size, max_num_tokens, num_stats)


class ExpertMemory:
    """Buffers of all ranks. Creation and :meth:`close` are collective."""

    def __init__(self, num_bytes: int, backend: Any) -> None:
        check_ranks(backend.Get_size())
        agree(backend, "MoeAlltoAll", {"workspace_size_per_rank": num_bytes})
        self.peers = PeerWorkspace(whole(-(-num_bytes // 2)), backend, fill=0)
        self.num_bytes = 2 * self.peers.half_bytes
        address = self.peers.struct.buffers[self.peers.rank]
        device = self.peers.device.index
        self.tensor = pack_strided_memory(
            address, self.num_bytes, self.num_bytes, 1, torch.uint8, device
        )[0]
        self._outputs_end, self._tokens_begin = 0, self.num_bytes
        _opened[self.tensor.data_ptr()] = self

    def reserve(self, outputs_end: int = 0, tokens_begin: int | None = None) -> None:
        """Refuse parts that exchanges in sequence would use for both outputs and tokens."""
        end = max(self._outputs_end, outputs_end)
        begin = (
            self._tokens_begin if tokens_begin is None else min(self._tokens_begin, tokens_begin)
        )
        if end > begin:
            raise ValueError(
                f"`workspace` is too small: outputs take its first {end} bytes and received tokens "
                f"what lies behind byte {begin}, of {self.num_bytes}"
            )
        self._outputs_end, self._tokens_begin = end, begin

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        _opened.pop(self.tensor.data_ptr(), None)
        self.peers.close()


_opened: dict[int, ExpertMemory] = {}


def opened(workspace: Any) -> ExpertMemory:
    """The memory whose tensor `workspace` is."""
    found = _opened.get(workspace.data_ptr()) if isinstance(workspace, torch.Tensor) else None
    if found is None:
        raise ValueError("`workspace` must be of MoeAlltoAll.get_workspace, and open")
    return found


def expert_backend(mapping: Mapping, config: MnnvlConfig | None) -> Any:
    """The ranks that divide the experts with this one. Collective."""
    backend = config.comm_backend if config is not None else None
    if backend is None:
        backend = TorchDistBackend()
    if backend.Get_size() == mapping.moe_ep_size:
        return backend
    return backend.Split(mapping.moe_ep_group[0], mapping.moe_ep_rank)


_loading = threading.Lock()
_modules: dict[Any, Any] = {}


def load(config: ExpertDispatchConfig | ExpertCombineConfig) -> Any:
    """Build and load a module once, also where several threads are ranks."""
    with _loading:
        if config not in _modules:
            generate: Any = gen_expert_dispatch_module
            if isinstance(config, ExpertCombineConfig):
                generate = gen_expert_combine_module
            _modules[config] = generate(config).build_and_load()
        return _modules[config]


def dispatch_kernel(ep_size: int) -> Kernel:
    """``expert_dispatch`` of so many ranks."""
    return cast(Kernel, load(ExpertDispatchConfig(ep_size)).expert_dispatch)


def sanitize_kernel(ep_size: int) -> Kernel:
    """``expert_sanitize`` of so many ranks."""
    return cast(Kernel, load(ExpertDispatchConfig(ep_size)).expert_sanitize)


def combine_kernel(*config: Any) -> Kernel:
    """``expert_combine`` of dtypes and ranks."""
    return cast(Kernel, load(ExpertCombineConfig(*config)).expert_combine)
