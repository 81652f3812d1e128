"""Experts and weights of a layer's tokens, given or chosen by logits."""

from __future__ import annotations

import torch

from .._common import checks
from .._moe.maps import route
from ..tllm_enums import RoutingInputMode, RoutingMethodType
from .api import MoEActivationPack, RoutingConfig

# (scores of logits, whether a token's weights are divided by their sum, whether a bias counts)
_METHODS = {
    RoutingMethodType.Default: ("softmax", False, False),
    RoutingMethodType.Renormalize: ("softmax", True, False),
    RoutingMethodType.RenormalizeNaive: ("softmax", True, False),
    RoutingMethodType.DeepSeekV3: ("sigmoid", True, True),
    RoutingMethodType.Llama4: ("sigmoid", False, False),
    RoutingMethodType.SigmoidRenorm: ("sigmoid", True, False),
    RoutingMethodType.MiniMax2: ("sigmoid", True, True),
    RoutingMethodType.Sigmoid: ("sigmoid", False, False),
    RoutingMethodType.TopKSigmoid: ("sigmoid", False, False),
}


def check_method(config: RoutingConfig) -> None:
    """Refuse a routing that logits cannot have here."""
    if config.method not in _METHODS:
        allowed = ", ".join(method.name for method in _METHODS)
        raise ValueError(f"`method` must be one of {allowed}, got {config.method!r}")
    if config.method == RoutingMethodType.Llama4 and config.top_k != 1:
        raise ValueError(f"`top_k` must be 1 for Llama4, got {config.top_k}")
    if config.method != RoutingMethodType.DeepSeekV3 and (config.n_group or 1) != 1:
        raise ValueError(f"`n_group` must be None or 1 for {config.method.name}")


def find_experts(
    act: MoEActivationPack, config: RoutingConfig, enable_pdl: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[tokens, top_k]``: experts and their weights in float32.

    Raises
    ------
    TypeError, ValueError
        If the pack does not have what its mode needs.
    """
    if act.routing_input_mode == RoutingInputMode.FromLogits:
        return _route(act, config, enable_pdl)
    if act.topk_ids is None:
        raise ValueError("`topk_ids` must be given unless `routing_input_mode` is FromLogits")
    ids = checks.tensor("topk_ids", act.topk_ids, 2)
    if ids.shape[1] != config.top_k:
        raise ValueError(f"`topk_ids` must be [tokens, {config.top_k}], got {list(ids.shape)}")
    if act.topk_weights is not None:
        weights = checks.tensor("topk_weights", act.topk_weights, 2)
        checks.dtype("topk_weights", weights.dtype, (torch.float32, torch.bfloat16))
        return ids, weights.float()
    if act.routing_input_mode == RoutingInputMode.UnpackedPrecomputed:
        raise ValueError("`topk_weights` must be given for UnpackedPrecomputed")
    checks.dtype("topk_ids", ids.dtype, (torch.int32,))
    return ids >> 16, (ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()


def _route(
    act: MoEActivationPack, config: RoutingConfig, enable_pdl: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if act.routing_logits is None:
        raise ValueError("`routing_logits` must be given for FromLogits")
    check_method(config)
    logits, bias = checks.tensor("routing_logits", act.routing_logits, 2), act.routing_bias
    if logits.shape != (act.num_tokens, config.num_experts):
        raise ValueError(
            f"`routing_logits` must have shape [{act.num_tokens}, {config.num_experts}], got "
            f"{list(logits.shape)}"
        )
    score, renormalize, is_biased = _METHODS[config.method]
    if bias is not None:
        if not is_biased:
            raise ValueError(f"`routing_bias` must be None for {config.method.name}")
        if checks.tensor("routing_bias", bias, 1).shape != logits.shape[1:]:
            raise ValueError(
                f"`routing_bias` must have shape [{config.num_experts}], got {list(bias.shape)}"
            )
        bias = bias.float()
    shape = act.num_tokens, config.top_k
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    route(
        logits,
        bias,
        weights,
        experts,
        score=score,
        groups=(config.n_group or 1, config.topk_group or 1),
        renormalize=renormalize,
        scale=1.0 if config.routed_scaling_factor is None else config.routed_scaling_factor,
        enable_pdl=enable_pdl,
    )
    return experts, weights
