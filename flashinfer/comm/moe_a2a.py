"""Functions of the experts' all-to-all: tokens go to the ranks of their experts, outputs back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from .._common import checks
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..compat.backends import BackendSupportedError
from ..tllm_enums import SfLayout
from . import expert_memory
from .expert_memory import MAX_PAYLOADS, ExpertMemory, Layout, whole
from .graph_results import combine_results

MoeAlltoAllBackend = Literal["trtllm", "cake"]


def check_backend(backend: Any) -> None:
    if checks.choice("backend", backend, ("trtllm", "cake")) == "cake":
        raise BackendSupportedError("`backend` 'cake' is for Blackwell: take 'trtllm'")


def moe_a2a_active_rank_mask(active_ranks: Sequence[int], ep_size: int) -> torch.Tensor:
    """Ranks that take part in an exchange.

    Parameters
    ----------
    active_ranks : sequence of int
        Their numbers, 0 to ``ep_size - 1``.
    ep_size : int
        All ranks, at most 64.

    Returns
    -------
    torch.Tensor
        uint64 ``[1]`` on the CPU, a bit for each rank.
    """
    checks.count("ep_size", ep_size, 1, 64)
    bits = 0
    for rank in active_ranks:
        bits |= 1 << checks.count("active_ranks", rank, 0, ep_size - 1)
    return torch.tensor([bits], dtype=torch.uint64)


def _active(enable_rank_mask: bool, mask: torch.Tensor | None, ep_size: int) -> int | torch.Tensor:
    """The mask as the bindings take it: a number, or int64 on the device."""
    if mask is None:
        return (1 << ep_size) - 1
    if not enable_rank_mask:
        raise ValueError("`active_rank_mask` needs enable_rank_mask=True")
    checks.dtype("active_rank_mask", checks.tensor("active_rank_mask", mask).dtype, (torch.uint64,))
    mask = mask.view(torch.int64)
    return mask if mask.is_cuda else int(mask.item())


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: MoeAlltoAllBackend = "trtllm",
) -> int:
    """Bytes of a rank's workspace.

    Parameters
    ----------
    ep_size : int
        Ranks.
    max_num_tokens : int
        Most tokens that a rank has in a call.
    total_dispatch_payload_size_per_token, combine_payload_size_per_token : int
        Bytes of all of a token's payloads, and of an expert's output.
    eplb_stats_num_experts : int
        Length of the statistics that are gathered; 0: none.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Returns
    -------
    int
        Bytes.
    """
    check_backend(backend)
    layout = Layout.of(ep_size, max_num_tokens, eplb_stats_num_experts)
    places = ep_size * max_num_tokens
    outputs = whole(places * combine_payload_size_per_token)
    tokens = whole(places * total_dispatch_payload_size_per_token) + 256 * MAX_PAYLOADS
    return layout.outputs + outputs + tokens


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: MoeAlltoAllBackend = "trtllm",
) -> torch.Tensor:
    """What calls on a workspace must know of it.

    Parameters
    ----------
    workspace : torch.Tensor
        ``MoeAlltoAll.get_workspace(...)["workspace"]``: this rank's bytes.
    ep_rank, ep_size : int
        The workspace's own.
    max_num_tokens, eplb_stats_num_experts : int
        As in `moe_a2a_get_workspace_size_per_rank`.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Returns
    -------
    torch.Tensor
        int64 on the CPU, for the other functions.

    Raises
    ------
    ValueError
        If the workspace is not open or of other ranks.
    """
    check_backend(backend)
    _opened(workspace, ep_rank, ep_size)
    return torch.tensor(Layout.of(ep_size, max_num_tokens, eplb_stats_num_experts))


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor,
    leading_shape: list[int],
    slice_start: int,
    slice_end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bytes of a workspace as a tensor ``[*leading_shape, the rest]`` of `dtype`."""
    part = workspace.flatten()[slice_start:slice_end].view(dtype)
    return part.view(*leading_shape, part.numel() // math.prod(leading_shape))


def _opened(workspace: Any, ep_rank: int, ep_size: int) -> ExpertMemory:
    memory = expert_memory.opened(workspace)
    memory.peers.check_place(("ep_rank", "ep_size"), ep_rank, ep_size)
    return memory


def _layout(metainfo: torch.Tensor) -> Layout:
    values = checks.tensor("metainfo", metainfo, 1).tolist()
    if len(values) != len(Layout._fields):
        raise ValueError("`metainfo` must be of moe_a2a_initialize")
    return Layout(*values)


def _received(
    memory: ExpertMemory, payloads: list[torch.Tensor], layout: Layout, max_tokens: int
) -> list[tuple[int, int]]:
    """Begin and end of each payload that arrives, in bytes."""
    end, places = memory.num_bytes, layout.ep_size * max_tokens
    ranges = []
    for payload in payloads:
        row = payload.element_size() * math.prod(payload.shape[1:])
        begin = end - whole(places * row)
        ranges.append((begin, begin + places * row))
        end = begin
    memory.reserve(outputs_end=layout.outputs, tokens_begin=end)
    return ranges


@flashinfer_api
def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    *,
    backend: MoeAlltoAllBackend = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], int, torch.Tensor | None]:
    """Send each token once to every rank that has one of its experts. Collective.

    Rank r has the experts ``r * num_experts / ep_size`` and those that follow; an expert below 0 or
    beyond the last one is nowhere. Tokens of a rank arrive in their order, from place 0 on. A
    combine must follow before the next dispatch.

    Parameters
    ----------
    token_selected_experts : torch.Tensor
        ``[tokens, top_k]``, int32, contiguous; no tokens are allowed.
    input_payloads : list of torch.Tensor
        One to eight of ``[tokens, ...]``, contiguous, any dtype: activations, their scales, expert
        numbers, weights. Shapes beyond the first dimension and dtypes are alike on all ranks.
    workspace, metainfo : torch.Tensor
        Made by `MoeAlltoAll.get_workspace` and `moe_a2a_initialize`.
    runtime_max_tokens_per_rank : int
        Most tokens of a rank in this call, alike on all ranks.
    ep_rank, ep_size, top_k, num_experts : int
        This rank and all, choices of a token, experts of all ranks.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the GPU has it.
    eplb_local_stats : torch.Tensor, optional
        int32 ``[eplb_stats_num_experts]``: gathered from all ranks on the way.
    enable_rank_mask, active_rank_mask : bool and torch.Tensor, optional
        Ranks that take part, of `moe_a2a_active_rank_mask`, on the CPU or on the GPU. Others are
        not sent to and not waited for; they may not come back later.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.
    recv_view_cache : dict, optional
        Keeps the returned views from call to call.

    Returns
    -------
    received : list of torch.Tensor
        ``[ep_size, runtime_max_tokens_per_rank, elements]`` of each payload, in the workspace: all
        dimensions of a token are one. Places without a token hold anything.
    combine_payload_offset : int
        For `moe_a2a_combine`.
    gathered_stats : torch.Tensor or None
        ``[ep_size, eplb_stats_num_experts]``, in the workspace.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    check_backend(backend)
    memory, layout = _opened(workspace, ep_rank, ep_size), _layout(metainfo)
    experts = checks.tensor("token_selected_experts", token_selected_experts, 2)
    if experts.shape[1] != top_k:
        raise ValueError(f"`token_selected_experts` must have {top_k} columns, got {experts.shape}")
    max_tokens = checks.count(
        "runtime_max_tokens_per_rank", runtime_max_tokens_per_rank, 1, layout.max_num_tokens
    )
    if not 1 <= len(input_payloads) <= MAX_PAYLOADS:
        raise ValueError(
            f"`input_payloads` must be 1 to {MAX_PAYLOADS} tensors, got {len(input_payloads)}"
        )
    for payload in input_payloads:
        checks.tensor("input_payloads", payload)
    stats = eplb_local_stats
    if stats is not None and stats.numel() != layout.num_stats:
        raise ValueError(f"`eplb_local_stats` must have {layout.num_stats} elements")
    ranges = _received(memory, input_payloads, layout, max_tokens)
    surplus = MAX_PAYLOADS - len(input_payloads)
    checks.cuda_tensors(token_selected_experts=experts)
    memory.peers.launch(
        expert_memory.dispatch_kernel(ep_size),
        experts,
        (*(_bytes(payload) for payload in input_payloads), *[None] * surplus),
        (*(begin for begin, _ in ranges), *[0] * surplus),
        _active(enable_rank_mask, active_rank_mask, ep_size),
        stats,
        (layout.slots, layout.gathered_stats, max_tokens, num_experts),
        enable_pdl,
    )
    kinds = tuple((payload.dtype, payload.shape[1:]) for payload in input_payloads)
    key = (tuple(ranges), max_tokens, kinds)
    if recv_view_cache is None or key not in recv_view_cache:
        views = _views(memory, input_payloads, ranges, (ep_size, max_tokens))
        if recv_view_cache is None:
            recv_view_cache = {}
        recv_view_cache[key] = views
    return recv_view_cache[key], layout.outputs, _gathered(memory, layout, stats)


def _views(
    memory: ExpertMemory,
    payloads: list[torch.Tensor],
    ranges: list[tuple[int, int]],
    places: tuple[int, int],
) -> list[torch.Tensor]:
    """The places of each payload, with the elements of a token in one dimension."""
    return [
        memory.tensor[begin:end].view(payload.dtype).view(*places, math.prod(payload.shape[1:]))
        for payload, (begin, end) in zip(payloads, ranges, strict=True)
    ]


def _bytes(payload: torch.Tensor) -> torch.Tensor:
    """A payload of any dtype as one that bindings take."""
    return payload.view(torch.uint8) if payload.dtype.itemsize == 1 else payload


def _gathered(
    memory: ExpertMemory, layout: Layout, stats: torch.Tensor | None
) -> torch.Tensor | None:
    if stats is None:
        return None
    size = 4 * layout.ep_size * layout.num_stats
    part = memory.tensor[layout.gathered_stats : layout.gathered_stats + size]
    return part.view(torch.int32).view(layout.ep_size, layout.num_stats)


@graph_operator("expert_ids")
@flashinfer_api
def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: MoeAlltoAllBackend = "trtllm",
) -> None:
    """Give places that no token took an expert that means none.

    Parameters
    ----------
    expert_ids : torch.Tensor
        int32 ``[ep_size, max_tokens, top_k]`` that the last dispatch on the workspace received.
    workspace, metainfo, ep_rank
        As in `moe_a2a_dispatch`.
    invalid_expert_id : int
        The number for these places.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the GPU has it.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed.
    """
    check_backend(backend)
    ep_size = _layout(metainfo).ep_size
    memory = _opened(workspace, ep_rank, ep_size)
    checks.cuda_tensors(expert_ids=checks.tensor("expert_ids", expert_ids, 3))
    memory.peers.launch(
        expert_memory.sanitize_kernel(ep_size), expert_ids, invalid_expert_id, enable_pdl
    )


@graph_operator("output", results=combine_results)
@flashinfer_api
def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: torch.Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: SfLayout = SfLayout.layout_linear,
    output: torch.Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    backend: MoeAlltoAllBackend = "trtllm",
) -> torch.Tensor:
    """Add what the experts of all ranks made of each token. Collective, after a dispatch.

    Parameters
    ----------
    payload : torch.Tensor
        ``[ep_size, runtime_max_tokens_per_rank, hidden]``, contiguous, float16, bfloat16, float32
        or float8_e4m3fn: for each received token the weighted sum over this rank's experts. The
        hidden size is a multiple of 8.
    local_num_tokens : int
        Tokens that this rank dispatched.
    workspace, metainfo, runtime_max_tokens_per_rank, ep_rank, ep_size, top_k
        As in the dispatch.
    combine_payload_offset : int
        Returned by the dispatch.
    payload_in_workspace : bool
        `payload` is the workspace's part at that offset, and is not copied.
    output_dtype : torch.dtype, optional
        float16, bfloat16, float32 or float8_e4m3fn; None: that of `payload`.
    output_scales : torch.Tensor, optional
        Must be None: quantise the result in a call of its own.
    output_scalar_scale : float
        Must be 1: the scale of codes that come with `output_scales`.
    sf_layout : SfLayout
        Must be layout_linear, the default: the layout of `output_scales`.
    output : torch.Tensor, optional
        ``[local_num_tokens, hidden]``; None: made.
    use_low_precision : bool
        Outputs cross the link in float8_e4m3fn, rounded and saturated; not with
        `payload_in_workspace`.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the GPU has it.
    enable_rank_mask, active_rank_mask
        As in the dispatch.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Returns
    -------
    torch.Tensor
        The sum in float32 in the order of the ranks, rounded once; 0 for a token without experts.

    Raises
    ------
    TypeError, ValueError
        If an argument is not allowed, before anything is read.
    CommError
        If an earlier call on the workspace has timed out.
    """
    check_backend(backend)
    _refuse_codes(output_scales, output_scalar_scale, sf_layout)
    checks.count("top_k", top_k)
    memory, layout = _opened(workspace, ep_rank, ep_size), _layout(metainfo)
    checks.tensor("payload", payload, 3)
    checks.count("local_num_tokens", local_num_tokens, 0, runtime_max_tokens_per_rank)
    if list(payload.shape[:2]) != [ep_size, runtime_max_tokens_per_rank]:
        raise ValueError(
            f"`payload` must have shape [{ep_size}, {runtime_max_tokens_per_rank}, hidden], got "
            f"{list(payload.shape)}"
        )
    stored = torch.float8_e4m3fn if use_low_precision else payload.dtype
    _check_place(memory, payload, combine_payload_offset, payload_in_workspace, stored)
    if output is None:
        output = payload.new_empty(
            local_num_tokens, payload.shape[2], dtype=output_dtype or payload.dtype
        )
    elif list(output.shape) != [local_num_tokens, payload.shape[2]] or (
        output_dtype not in (None, output.dtype)
    ):
        raise ValueError(
            f"`output` must have shape {[local_num_tokens, payload.shape[2]]} and `output_dtype`, "
            f"got {list(output.shape)} and {output.dtype}"
        )
    checks.cuda_tensors(payload=payload)
    memory.peers.launch(
        expert_memory.combine_kernel(payload.dtype, stored, output.dtype, ep_size),
        payload,
        output,
        _active(enable_rank_mask, active_rank_mask, ep_size),
        (payload_in_workspace, layout.slots, combine_payload_offset),
        enable_pdl,
    )
    return output


def _refuse_codes(output_scales: Any, output_scalar_scale: Any, sf_layout: Any) -> None:
    """Refuse what would make codes with block scales of the sums."""
    remedy = "quantise the result in a call of its own"
    if output_scales is not None:
        raise BackendSupportedError(f"`output_scales` must be None: {remedy}")
    if checks.number("output_scalar_scale", output_scalar_scale) != 1.0:
        raise ValueError(f"`output_scalar_scale` must be 1, got {output_scalar_scale}: {remedy}")
    if sf_layout != SfLayout.layout_linear:
        raise ValueError(f"`sf_layout` must be SfLayout.layout_linear, got {sf_layout!r}: {remedy}")


def _check_place(
    memory: ExpertMemory, payload: torch.Tensor, offset: int, is_there: bool, stored: torch.dtype
) -> None:
    memory.reserve(outputs_end=offset + payload.numel() * stored.itemsize)
    if not is_there:
        return
    if stored != payload.dtype:
        raise ValueError("`use_low_precision` must be False with payload_in_workspace")
    if payload.data_ptr() != memory.tensor.data_ptr() + offset:
        raise ValueError("`payload` must lie at `combine_payload_offset` of `workspace`")
