"""Experts and weights of tokens."""

from typing import Literal

import torch

from .._common import checks
from .._common.dtypes import FLOAT
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs, since
from .._moe.maps import route, route_by_table
from ..compat.backends import BackendSupportedError
from ..trace.templates.moe_routing import fused_topk_deepseek_trace, hash_topk_trace

_MOST_CHOICES = 32
"""One warp routes a token, a lane for each choice."""


@says_where_it_runs(since(75), {"default": since(75)})
@flashinfer_api(trace=fused_topk_deepseek_trace)
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    *,
    backend: Literal["default", "cake"] = "default",
) -> None:
    """Route tokens as DeepSeek-V3 does: sigmoid, the best groups of experts, the best of these.

    An expert is chosen by ``sigmoid(scores) + bias``, a group counts what its two best experts have
    together. A chosen expert's weight is its sigmoid without the bias; a token's weights sum to
    `routed_scaling_factor`. The expert with the lower number is the better one of two equal ones.

    Parameters
    ----------
    scores : torch.Tensor
        ``[tokens, experts]``, float32, float16 or bfloat16, rows contiguous: the router's logits;
        at most 1024 experts.
    bias : torch.Tensor
        ``[experts]``, float32, float16 or bfloat16.
    n_group, topk_group : int
        Groups of neighbouring experts, at most 32, and how many of them are kept.
    topk : int
        Experts of a token, at most 32.
    routed_scaling_factor : float
        Sum of a token's weights.
    topk_values, topk_indices : torch.Tensor
        ``[tokens, topk]``, float32 and int32, contiguous: receive weights and experts, the best
        expert first.
    launch_with_pdl : bool
        Programmatic dependent launch where the device has it. Changes no result.
    routing_replay_out : torch.Tensor, optional
        ``[at least tokens, topk]``, int16 or int32: receives the experts, too.
    backend : {"default"}
        This library's kernel; ``"cake"`` is for Blackwell and is refused.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """
    if backend != "default":
        raise BackendSupportedError(f"`backend` must be 'default', got {backend!r}")
    checks.tensor("scores", scores, 2)
    checks.contiguous("bias", bias, 1)
    checks.dtype("bias", bias.dtype, FLOAT)
    checks.tensor("topk_values", topk_values, 2)
    checks.tensor("topk_indices", topk_indices, 2)
    if topk_values.shape[1] != checks.count("topk", topk):
        raise ValueError(f"`topk_values` must be [tokens, {topk}], got {list(topk_values.shape)}")
    if routing_replay_out is not None:
        checks.tensor("routing_replay_out", routing_replay_out, 2)
        checks.dtype("routing_replay_out", routing_replay_out.dtype, (torch.int16, torch.int32))
        tokens = topk_indices.shape[0]
        if routing_replay_out.shape[0] < tokens or routing_replay_out.shape[1] != topk:
            raise ValueError(
                f"`routing_replay_out` must be [at least {tokens}, {topk}], got "
                f"{list(routing_replay_out.shape)}"
            )
    checks.cuda_tensors(scores=scores, bias=bias)
    route(
        scores,
        bias.float(),
        topk_values,
        topk_indices,
        score="sigmoid",
        groups=(n_group, topk_group),
        scale=checks.number("routed_scaling_factor", routed_scaling_factor),
        enable_pdl=None if checks.flag("launch_with_pdl", launch_with_pdl) else False,
    )
    if routing_replay_out is not None:
        routing_replay_out[: topk_indices.shape[0]].copy_(topk_indices)


@says_where_it_runs(since(75))
@flashinfer_api(trace=hash_topk_trace)
def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens by a table of their ids, as the first layers of DeepSeek-V4 do.

    The weight of an expert is ``sqrt(softplus(logit))`` over the sum of the token's experts. A
    layer multiplies the experts' sum by `routed_scaling_factor`; a shared expert that is computed
    as one of them has the reciprocal as its weight, so that it counts once.

    Parameters
    ----------
    router_logits : torch.Tensor
        ``[tokens, experts]``, float32, float16 or bfloat16, rows contiguous.
    input_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous. An id that the table does not have gives experts
        -1 with weights 0.
    tid2eid : torch.Tensor
        ``[ids, top_k]``, int32 or int64, contiguous: the experts of each id; at most 32 with the
        shared one.
    num_fused_shared_experts : int
        1: each token's last choice is the shared expert, whose number follows the router's.
    routed_scaling_factor : float
        Positive where a shared expert is appended, otherwise without effect.
    launch_with_pdl : bool
        Programmatic dependent launch where the device has it. Changes no result.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Weights and experts, ``[tokens, top_k + num_fused_shared_experts]``, float32 and int32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    DeepSeek-AI, the model code that is published with DeepSeek-V4.
    """
    shared = checks.count("num_fused_shared_experts", num_fused_shared_experts, 0)
    if shared > 1:
        raise ValueError(f"`num_fused_shared_experts` must be 0 or 1, got {shared}")
    scale = checks.number("routed_scaling_factor", routed_scaling_factor)
    if shared and not scale > 0:
        raise ValueError(f"`routed_scaling_factor` must be positive, got {scale}")
    checks.tensor("router_logits", router_logits, 2)
    checks.tensor("input_ids", input_ids, 1)
    checks.tensor("tid2eid", tid2eid, 2)
    checks.cuda_tensors(router_logits=router_logits, input_ids=input_ids, tid2eid=tid2eid)
    if tid2eid.shape[1] + shared > _MOST_CHOICES:
        raise ValueError(
            f"`tid2eid` must have at most {_MOST_CHOICES - shared} experts for each id beside "
            f"{shared} shared ones, got shape {list(tid2eid.shape)}"
        )
    enable_pdl = None if checks.flag("launch_with_pdl", launch_with_pdl) else False
    weights, experts = route_by_table(router_logits, input_ids, tid2eid, enable_pdl)
    if shared:
        weights = torch.nn.functional.pad(weights, (0, 1), value=1 / scale)
        experts = torch.nn.functional.pad(experts, (0, 1), value=router_logits.shape[1])
    return weights, experts
