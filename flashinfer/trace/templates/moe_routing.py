"""Templates and references of routers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..._common.checks import number
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_FLOAT = ("float32", "bfloat16", "float16")


def _fused_topk_deepseek_reference(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight = sigmoid(score) / sum, for the experts with the largest sigmoid(score) + bias.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """
    sigmoid = torch.sigmoid(scores.float())
    tokens, experts = sigmoid.shape
    compared = sigmoid + bias.float()
    by_group = compared.reshape(tokens, n_group, experts // n_group)
    best = by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
    allowed = torch.zeros(tokens, n_group, dtype=torch.bool, device=scores.device)
    allowed = allowed.scatter(1, kept, True)[..., None].expand(by_group.shape)
    masked = by_group.masked_fill(~allowed, float("-inf")).reshape(tokens, experts)
    chosen = masked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = sigmoid.gather(1, chosen).double()
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor
    return weights, chosen.to(torch.int32)


def _fused_topk_deepseek_replay_reference(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    routing_replay_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As fused_topk_deepseek, and routing_replay_out[t] = experts of token t.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """
    weights, chosen = _fused_topk_deepseek_reference(
        scores, bias, n_group, topk_group, topk, routed_scaling_factor
    )
    assert routing_replay_out is not None
    copies = routing_replay_out.clone()
    copies[: chosen.shape[0]] = chosen.to(copies.dtype)
    return weights, chosen, copies


def _hash_topk_reference(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight = sqrt(softplus(logit)) / sum, for the experts that the table names.

    Source: DeepSeek-AI, the model code that is published with DeepSeek-V4.
    """
    experts = router_logits.shape[1]
    known = (input_ids >= 0) & (input_ids < tid2eid.shape[0])
    rows = torch.where(known, input_ids, 0).long()
    chosen = tid2eid[rows].long() if tid2eid.shape[0] else rows[:, None] - 1
    exists = known[:, None] & (chosen >= 0) & (chosen < experts)
    logits = router_logits.double().gather(1, torch.where(exists, chosen, 0))
    weights = torch.where(exists, torch.nn.functional.softplus(logits).sqrt(), 0.0)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, torch.where(exists, chosen, -1).to(torch.int32)


def _hash_topk_shared_reference(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's experts, then the shared one with weight 1 / routed_scaling_factor.

    Source: as for the table's experts.
    """
    weights, experts = _hash_topk_reference(router_logits, input_ids, tid2eid)
    pad = torch.nn.functional.pad
    number = router_logits.shape[1]
    return pad(weights, (0, 1), value=1 / routed_scaling_factor), pad(experts, (0, 1), value=number)


def _deepseek_init(arguments: dict[str, Any], replays: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    scores, device = arguments["scores"], arguments["scores"].device
    copies = torch.full((9, 8), -7, dtype=torch.int16, device=device)
    return {
        **arguments,
        "routing_replay_out": copies if replays else None,
        "scores": torch.randn(7, 256, generator=generator).to(device, scores.dtype),
        "bias": (torch.randn(256, generator=generator) * 0.1).to(device),
        "n_group": 8,
        "topk_group": 4,
        "topk": 8,
        "routed_scaling_factor": 2.5,
        "topk_values": torch.empty(7, 8, device=device),
        "topk_indices": torch.empty(7, 8, dtype=torch.int32, device=device),
    }


def _hash_init(arguments: dict[str, Any], shared: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    device = arguments["input_ids"].device
    return {
        **arguments,
        "router_logits": torch.randn(7, 64, generator=generator).to(device),
        "input_ids": torch.randint(0, 100, (7,), generator=generator).to(device),
        "tid2eid": torch.randint(0, 64, (100, 6), generator=generator).to(device, torch.int32),
        **({"routed_scaling_factor": 2.5, "num_fused_shared_experts": 1} if shared else {}),
    }


def _deepseek_template(replays: bool) -> TraceTemplate:
    axes: dict[str, Axis] = {
        "tokens": Var("Tokens."),
        "experts": Const("Experts of the router.", abbrev="e"),
        "topk": Const("Experts of a token.", abbrev="k"),
    }
    inputs: dict[str, Value] = {
        "scores": Tensor(["tokens", "experts"], dtypes=_FLOAT, layout="rows"),
        "bias": Tensor(
            ["experts"],
            dtypes=_FLOAT,
            layout="contiguous",
            description="Added for the choice alone.",
        ),
        "n_group": Scalar("int32", minimum=1, description="Groups of neighbouring experts."),
        "topk_group": Scalar("int32", minimum=1, description="Groups that are kept."),
        "routed_scaling_factor": Scalar(description="Sum of a token's weights."),
    }
    outputs: dict[str, Value] = {
        "topk_values": Tensor(
            ["tokens", "topk"], dtype="float32", param="topk_values", returned=False
        ),
        "topk_indices": Tensor(
            ["tokens", "topk"], dtype="int32", param="topk_indices", returned=False
        ),
    }
    if replays:
        axes["copies"] = Var("Rows of the copy, at least as many as tokens.")
        copy = Tensor(
            ["copies", "topk"],
            dtypes=("int16", "int32"),
            param="routing_replay_out",
            returned=False,
            description="The experts; further rows are left alone.",
        )
        inputs["routing_replay_out"] = outputs["routing_replay_out"] = copy
    reference = _fused_topk_deepseek_replay_reference if replays else _fused_topk_deepseek_reference
    return TraceTemplate(
        "moe_routing",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        name_prefix="fused_topk_deepseek" + ("_replay" if replays else ""),
        reference=reference,
        init=functools.partial(_deepseek_init, replays=replays),
        constraints=[
            "experts >= topk",
            "n_group >= 1",
            "experts % n_group == 0",
            "topk_group <= n_group",
            "topk * n_group <= experts * topk_group",
            *(["copies >= tokens"] if replays else []),
        ],
        hints=("launch_with_pdl",),
        options={"backend": ("default",), **({} if replays else {"routing_replay_out": (None,)})},
        description="Sigmoid routing with groups and a bias.",
    )


_DEEPSEEK, _DEEPSEEK_REPLAY = _deepseek_template(False), _deepseek_template(True)


def fused_topk_deepseek_trace(**arguments: Any) -> TraceTemplate:
    """The template of a call with or without a copy of the experts."""
    return _DEEPSEEK if arguments.get("routing_replay_out") is None else _DEEPSEEK_REPLAY


fused_topk_deepseek_trace.templates = [  # type: ignore[attr-defined]
    _DEEPSEEK,
    _DEEPSEEK_REPLAY,
]


def _without_factor(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call without a shared expert, whose weight is all that the layer's factor decides."""
    number("routed_scaling_factor", arguments.get("routed_scaling_factor", 1.0))
    return {name: value for name, value in arguments.items() if name != "routed_scaling_factor"}


def _hash_template(shared: bool) -> TraceTemplate:
    axes: dict[str, Axis] = {
        "tokens": Var("Tokens."),
        "experts": Const("Experts of the router.", abbrev="e"),
        "ids": Const("Ids of the table.", abbrev=""),
        "top_k": Const("Experts of an id.", abbrev="k"),
    }
    inputs: dict[str, Value] = {
        "router_logits": Tensor(["tokens", "experts"], dtypes=_FLOAT, layout="rows"),
        "input_ids": Tensor(["tokens"], dtypes=("int32", "int64"), layout="contiguous"),
        "tid2eid": Tensor(["ids", "top_k"], dtypes=("int32", "int64"), layout="contiguous"),
    }
    if shared:
        axes["choices"] = Const(
            "Experts of an id and the shared one.", "", derive=lambda sizes: sizes["top_k"] + 1
        )
        inputs["routed_scaling_factor"] = Scalar(
            above=0, description="The layer's factor: the shared expert's weight is 1 / it."
        )
    row = ["tokens", "choices" if shared else "top_k"]
    return TraceTemplate(
        "moe_routing",
        axes=axes,
        inputs=inputs,
        outputs={
            "topk_weights": Tensor(row, dtype="float32"),
            "topk_ids": Tensor(row, dtype="int32"),
        },
        name_prefix="hash_topk" + ("_shared" if shared else ""),
        reference=_hash_topk_shared_reference if shared else _hash_topk_reference,
        init=functools.partial(_hash_init, shared=shared),
        constraints=["top_k <= 31" if shared else "top_k <= 32"],
        hints=("launch_with_pdl",),
        options={"num_fused_shared_experts": (int(shared),)},
        gather=None if shared else _without_factor,
        description="Routing by a table of token ids.",
    )


_HASH, _HASH_SHARED = _hash_template(False), _hash_template(True)


def hash_topk_trace(**arguments: Any) -> TraceTemplate:
    """The template of a call with or without a shared expert."""
    return _HASH_SHARED if arguments.get("num_fused_shared_experts") == 1 else _HASH


hash_topk_trace.templates = [_HASH, _HASH_SHARED]  # type: ignore[attr-defined]
