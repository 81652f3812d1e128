"""Template of causal attention in which queries also see a range of keys in both directions."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch

from ..._common.checks import choice
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention import _HEAD_RULES, _HEADS, by_lse, indices, kv_tensor, results
from .attention_arguments import gather_paged, planned_problem, predict_planned
from .attention_reference import _paged_attention_reference


def _bidirectional_ranges_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bidirectional_ranges: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    v_scale: float = 1.0,
    causal_window_left: int = -1,
    range_window_left: int = -1,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v. A query at position P of its request, whose range is
    [s, e], sees key j if 0 <= P - j <= causal_window_left, or if s <= j <= e and P - j <=
    range_window_left; a negative window has no end.

    Source: Gemma Team, "Gemma 3 Technical Report", 2025 (tokens of an image see each other).
    """
    rows, pages = qo_indptr.tolist(), kv_indptr.tolist()
    masks = []
    for request, last in enumerate(kv_last_page_len.tolist()):
        begin, end = rows[request : request + 2]
        count = pages[request + 1] - pages[request]
        kv_len = (count - 1) * k_cache.shape[1] + last if count else 0
        key = torch.arange(kv_len, device=q.device)
        position = torch.arange(begin, end, device=q.device) + (kv_len - end)
        distance = position[:, None] - key
        first, final = bidirectional_ranges[begin:end].long().unbind(1)
        causal = distance >= 0
        inside = (first[:, None] <= key) & (key <= final[:, None])
        if causal_window_left >= 0:
            causal &= distance <= causal_window_left
        if range_window_left >= 0:
            inside &= distance <= range_window_left
        masks.append((causal | inside).flatten())
    return _paged_attention_reference(
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        sm_scale,
        qo_indptr=qo_indptr,
        v_scale=v_scale,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        custom_mask=torch.cat([torch.ones(0, dtype=torch.bool, device=q.device), *masks]),
    )


def _gather(run: Mapping[str, Any]) -> dict[str, Any]:
    """As for a plan without the variant, whose mask the ranges say."""
    choice("kv_cache_sf", run.get("kv_cache_sf"), (None,))
    for name in ("q_scale", "k_scale", "v_scale"):
        scale = run.get(name)
        if isinstance(scale, torch.Tensor) and not (scale.is_cpu and scale.numel() == 1):
            raise ValueError(f"`{name}` must be a number, got a tensor")
    wrapper, problem = run["self"], planned_problem(run)
    spec = dataclasses.replace(problem.spec, variant=None)
    plain = SimpleNamespace(
        _problem=problem._replace(spec=spec), is_cuda_graph_enabled=wrapper.is_cuda_graph_enabled
    )
    inputs = gather_paged(ChainMap({"self": plain}, cast(Any, run)), args=())
    for name in ("causal", "sinks"):
        del inputs[name]
    windows = {name: run.get(name, -1) for name in ("causal_window_left", "range_window_left")}
    return {**inputs, "bidirectional_ranges": run["bidirectional_ranges"], **windows}


_AXES: dict[str, Axis] = {
    "total_q": Var("Queries of all requests."),
    **_HEADS,
    "num_pages": Var("Pages of the cache."),
    "page_size": Const("Tokens of a page.", abbrev="ps"),
    "num_kv_indices": Var("Pages of all requests."),
    "batch_size": Var("Requests."),
    "len_indptr": Var("batch_size + 1."),
    "two": Const("", abbrev="", value=2),
}
_SCALARS: dict[str, Value] = {
    "sm_scale": Scalar("float32", description="Factor of the logits."),
    "v_scale": Scalar("float32", optional=True, description="Factor of the result."),
    "causal_window_left": Scalar("int32", minimum=-1, description="Keys before; -1: all."),
    "range_window_left": Scalar("int32", minimum=-1, description="The same within the range."),
    "rope_scale": Scalar("float32", optional=True, above=0, description="Divides positions."),
    "rope_theta": Scalar("float32", optional=True, above=0, description="Base of frequencies."),
}


def _ranges_template(*, lse: bool) -> TraceTemplate:
    page = ["num_pages", "page_size"]
    return TraceTemplate(
        op_type="gqa_paged",
        name_prefix="bidirectional_ranges" + ("_lse" if lse else ""),
        description="Causal attention over pages; queries also see a range in both directions.",
        axes=_AXES,
        inputs={
            "q": Tensor(
                ["total_q", "num_qo_heads", "head_dim_qk"],
                dtypes=("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
                layout="rows",
            ),
            "k_cache": kv_tensor(page),
            "v_cache": kv_tensor(page, "k_cache"),
            "bidirectional_ranges": Tensor(
                ["total_q", "two"],
                dtype="int32",
                layout="contiguous",
                description="First and last key of each query's range; (-1, -1): none.",
            ),
            "qo_indptr": indices("len_indptr", "First query of each request."),
            "kv_indptr": indices("len_indptr", "First entry of each request in kv_indices."),
            "kv_indices": indices("num_kv_indices", "Page numbers."),
            "kv_last_page_len": indices("batch_size", "Tokens in each request's last page."),
            **_SCALARS,
        },
        outputs=results(["total_q"], lse=lse, destination=True),
        constraints=["len_indptr == batch_size + 1", *_HEAD_RULES],
        options={"pos_encoding_mode": ("NONE", "ROPE_LLAMA")},
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_bidirectional_ranges_reference,
        gather=_gather,
        predict=predict_planned,
    )


bidirectional_ranges_run_trace = by_lse(_ranges_template)
