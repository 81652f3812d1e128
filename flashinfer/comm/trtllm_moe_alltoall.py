"""The experts' all-to-all of a layer; its functions are in `moe_a2a`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .._common import checks
from ..tllm_enums import SfLayout
from . import expert_memory, moe_a2a
from .expert_memory import ExpertMemory
from .mapping import Mapping
from .mnnvl import MnnvlConfig
from .moe_a2a import MoeAlltoAllBackend
from .moe_a2a import moe_a2a_active_rank_mask as moe_a2a_active_rank_mask
from .moe_a2a import moe_a2a_combine as moe_a2a_combine
from .moe_a2a import moe_a2a_dispatch as moe_a2a_dispatch
from .moe_a2a import moe_a2a_get_workspace_size_per_rank as moe_a2a_get_workspace_size_per_rank
from .moe_a2a import moe_a2a_initialize as moe_a2a_initialize
from .moe_a2a import moe_a2a_sanitize_expert_ids as moe_a2a_sanitize_expert_ids
from .moe_a2a import (
    moe_a2a_wrap_payload_tensor_in_workspace as moe_a2a_wrap_payload_tensor_in_workspace,
)


class MoeAlltoAll:
    """Tokens to the ranks of their experts, and outputs back, over peer memory of one host.

    Layers with the same sizes share a workspace. Creation, dispatch and combine are collective.

    Parameters
    ----------
    mapping : Mapping
        `moe_ep_size` ranks, 2 to 16, divide the experts.
    max_num_tokens : int
        Most tokens that a rank has in a call.
    top_k, num_experts : int
        Choices of a token; experts of all ranks, a multiple of the ranks.
    workspace_size_per_rank : int, optional
        Bytes, of `moe_a2a_get_workspace_size_per_rank`; None: enough for `hidden_size` elements of
        16 bits with expert numbers and weights.
    hidden_size : int, optional
        Needed without `workspace_size_per_rank`.
    mnnvl_config : MnnvlConfig, optional
        Its `comm_backend` sets up the ranks; None: ``torch.distributed``.
    eplb_stats_num_experts : int
        Length of the statistics that a dispatch gathers; 0: none.
    enable_rank_mask : bool
        Calls may name the ranks that take part.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Raises
    ------
    ValueError
        If sizes are not allowed or differ among the ranks, or the ranks are on several hosts.
    """

    _WORKSPACE_CACHE: ClassVar[dict[tuple[Any, ...], dict[str, Any]]] = {}
    _METAINFO_INDEX: ClassVar[dict[str, int]] = {
        name: i for i, name in enumerate(expert_memory.Layout._fields)
    }

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: MoeAlltoAllBackend = "trtllm",
    ) -> None:
        moe_a2a.check_backend(backend)
        self.ep_rank, self.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
        self.max_num_tokens = checks.count("max_num_tokens", max_num_tokens)
        self.top_k = checks.count("top_k", top_k)
        self.num_experts = checks.count("num_experts", num_experts)
        if num_experts % self.ep_size:
            raise ValueError(
                f"`num_experts` must be a multiple of {self.ep_size}, got {num_experts}"
            )
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ValueError("`hidden_size` or `workspace_size_per_rank` is needed")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size, top_k, max_num_tokens, hidden_size, 0, eplb_stats_num_experts
            )
        self.enable_rank_mask = checks.flag("enable_rank_mask", enable_rank_mask)
        self._state = _shared_workspace(
            mapping,
            workspace_size_per_rank,
            max_num_tokens,
            eplb_stats_num_experts,
            mnnvl_config,
        )
        self._tokens: int | None = None  # of a dispatch without its combine
        self._gathered_stats: torch.Tensor | None = None

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Mapping,
        eplb_stats_num_experts: int = 0,
        *,
        backend: MoeAlltoAllBackend = "trtllm",
    ) -> dict[str, Any]:
        """The workspace of these sizes, made at the first call. Collective then.

        Returns a dictionary with ``workspace``, this rank's bytes (uint8), and ``metainfo``.
        """
        moe_a2a.check_backend(backend)
        if (ep_rank, ep_size) != (mapping.moe_ep_rank, mapping.moe_ep_size):
            raise ValueError("`ep_rank` and `ep_size` must be those of `mapping`")
        return _shared_workspace(
            mapping, workspace_size_per_rank, max_num_tokens, eplb_stats_num_experts, None
        )

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: MoeAlltoAllBackend = "trtllm",
    ) -> int:
        """Bytes for 16-bit activations and outputs, int32 expert numbers and float32 weights."""
        return moe_a2a.moe_a2a_get_workspace_size_per_rank(
            ep_size,
            max_num_tokens,
            2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token,
            2 * hidden_size,
            eplb_stats_num_experts,
            backend=backend,
        )

    @property
    def workspace(self) -> torch.Tensor:
        """This rank's bytes."""
        if self._state["memory"] is None:
            raise ValueError("`workspace` is prepared for a checkpoint")
        return self._state["workspace"]

    @property
    def metainfo(self) -> torch.Tensor:
        """The result of `moe_a2a_initialize`."""
        return self._state["metainfo"]

    @property
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """Statistics of the last dispatch that had some, ``[ep_size, eplb_stats_num_experts]``."""
        return self._gathered_stats

    def set_timeout(self, seconds: float) -> None:
        """How long kernels wait for another rank, also those of captured graphs."""
        expert_memory.opened(self.workspace).peers.set_timeout(seconds)

    def checkpoint_prepare(self) -> None:
        """Free the shared memory. Graphs captured before are invalid. Collective."""
        memory: ExpertMemory | None = self._state["memory"]
        if memory is not None:
            self._state.update(memory=None, workspace=None, views={})
            memory.close()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Create the shared memory again, over `comm_backend`. Collective."""
        if self._state["memory"] is None:
            memory = ExpertMemory(self._state["workspace_size_per_rank"], comm_backend)
            self._state.update(memory=memory, workspace=memory.tensor)

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Send tokens to the ranks of their experts: see `moe_a2a_dispatch`.

        With `invalid_token_expert_id`, places without a token get that number in the payload
        `expert_id_payload_index`, which are the expert numbers.

        Returns the received payloads, ``[ep_size, runtime_max_tokens_per_rank, elements]`` each.
        Raises a ValueError if a dispatch is not combined yet.
        """
        if self._tokens is not None:
            raise ValueError("`dispatch` must follow the combine of the dispatch before")
        if (invalid_token_expert_id is None) != (expert_id_payload_index is None):
            raise ValueError(
                "`invalid_token_expert_id` and `expert_id_payload_index` must be given together"
            )
        received, self._offset, stats = moe_a2a.moe_a2a_dispatch(
            token_selected_experts,
            input_payloads,
            self.workspace,
            self.metainfo,
            runtime_max_tokens_per_rank,
            self.ep_rank,
            self.ep_size,
            self.top_k,
            self.num_experts,
            eplb_local_stats=eplb_local_stats,
            enable_rank_mask=self.enable_rank_mask,
            active_rank_mask=active_rank_mask,
            recv_view_cache=self._state["views"],
        )
        self._tokens = token_selected_experts.shape[0]
        self._gathered_stats = stats if stats is not None else self._gathered_stats
        if invalid_token_expert_id is not None and expert_id_payload_index is not None:
            moe_a2a.moe_a2a_sanitize_expert_ids(
                received[expert_id_payload_index],
                self.workspace,
                self.metainfo,
                self.ep_rank,
                invalid_token_expert_id,
            )
        return received

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the outputs of all ranks' experts for this rank's tokens: see `moe_a2a_combine`.

        Raises a ValueError without a dispatch before.
        """
        if self._tokens is None:
            raise ValueError("`combine` must follow a dispatch")
        result = moe_a2a.moe_a2a_combine(
            payload,
            self._tokens,
            self.workspace,
            self.metainfo,
            runtime_max_tokens_per_rank,
            self.ep_rank,
            self.ep_size,
            self.top_k,
            self._offset,
            payload_in_workspace,
            output_dtype,
            output_scales,
            output_scalar_scale,
            sf_layout,
            output,
            use_low_precision=use_low_precision,
            enable_rank_mask=self.enable_rank_mask,
            active_rank_mask=active_rank_mask,
        )
        self._tokens = None
        return result

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Where experts may write their outputs, so that `combine` copies nothing.

        ``[ep_size, runtime_max_tokens_per_rank, hidden_size]``, after a dispatch.
        """
        if self._tokens is None:
            raise ValueError("`dispatch` must come first")
        places = self.ep_size * runtime_max_tokens_per_rank
        return moe_a2a.moe_a2a_wrap_payload_tensor_in_workspace(
            self.workspace,
            [self.ep_size, runtime_max_tokens_per_rank],
            self._offset,
            self._offset + places * hidden_size * dtype.itemsize,
            dtype,
        )


def _shared_workspace(
    mapping: Mapping,
    num_bytes: int,
    max_num_tokens: int,
    num_stats: int,
    config: MnnvlConfig | None,
) -> dict[str, Any]:
    """The workspace of these sizes, from before or new."""
    key = (num_bytes, mapping.moe_ep_rank, mapping.moe_ep_size, max_num_tokens, num_stats)
    found = MoeAlltoAll._WORKSPACE_CACHE.get(key)
    if found is not None and found["memory"] is not None:
        return found
    checks.count("workspace_size_per_rank", num_bytes, 1, 1 << 40)
    memory = ExpertMemory(num_bytes, expert_memory.expert_backend(mapping, config))
    metainfo = moe_a2a.moe_a2a_initialize(
        memory.tensor, mapping.moe_ep_rank, mapping.moe_ep_size, max_num_tokens, num_stats
    )
    state = {
        "memory": memory,
        "workspace": memory.tensor,
        "workspace_size_per_rank": num_bytes,
        "metainfo": metainfo,
        "views": {},  # of what arrives, which layers share with the memory
    }
    MoeAlltoAll._WORKSPACE_CACHE[key] = state
    return state
