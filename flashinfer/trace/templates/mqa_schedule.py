"""Template and reference of how a GPU's multiprocessors share paged scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._common import checks
from ..._common.arch import get_device_sm_count
from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate


def _reference(seq_lens: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Part i begins with unit floor(i total / num_parts) of all requests' units of 256 tokens;
    schedule[i] = its request, and its place among that request's units.

    Source: include/flashinfer/indexer/schedule.cuh states it.
    """
    units = (seq_lens.long().clamp(min=0) + 255) // 256
    ends = units.cumsum(0)
    total = int(units.sum())
    schedule = torch.zeros((num_parts + 1, 2), dtype=torch.int64, device=seq_lens.device)
    schedule[:, 0] = len(seq_lens)
    if total > 0:
        first = torch.arange(num_parts, device=seq_lens.device) * total // num_parts
        request = torch.searchsorted(ends, first, right=True)
        schedule[:-1, 0] = request
        schedule[:-1, 1] = first - (ends - units)[request]
    return schedule


def _num_parts(arguments: Mapping[str, Any]) -> int:
    """Multiprocessors of the tensor's device; a CPU counts as one."""
    device = arguments["seq_lens"].device
    return get_device_sm_count(device) if device.type == "cuda" else 1


def _gather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    checks.count("next_n", arguments.get("next_n", 1))
    checks.choice("variant", arguments.get("variant", "fp8"), ("fp8",))
    checks.choice("use_gpu_kernel", arguments.get("use_gpu_kernel", True), (True,))
    lengths = checks.tensor("seq_lens", arguments["seq_lens"], 1)
    device = arguments.get("device")
    if device is not None and torch.device(device).type != lengths.device.type:
        raise ValueError(f"`device` must be that of `seq_lens`, got {device!r}")
    return {"seq_lens": lengths, "num_parts": _num_parts(arguments), "out": arguments.get("out")}


def _draw(arguments: dict[str, Any]) -> dict[str, Any]:
    lengths = torch.tensor([700, 0, 256, 3000, 1], dtype=torch.int32)
    return {"seq_lens": lengths.to(arguments["seq_lens"].device)}


paged_mqa_logits_schedule_trace = TraceTemplate(
    "mqa_logits",
    axes={
        "batch_size": Var("Requests."),
        "num_rows": Var("num_parts + 1.", from_values=True),
        "two": Const("Request and unit.", abbrev="", value=2),
    },
    inputs={
        "seq_lens": Tensor(["batch_size"], dtype="int32", description="Tokens of each request."),
        "num_parts": Scalar("int32", minimum=1, description="Multiprocessors."),
    },
    outputs={"schedule": Tensor(["num_rows", "two"], param="out", dtype="int32")},
    name_prefix="paged_mqa_logits_schedule",
    reference=_reference,
    init=_draw,
    gather=_gather,
    predict=lambda arguments: {"num_rows": _num_parts(arguments) + 1},
    tags=["status:verified", "stage:decode"],
    description="Where each multiprocessor's share of paged scores begins.",
)
