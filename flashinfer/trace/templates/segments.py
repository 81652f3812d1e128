"""Template of `SegmentGEMMWrapper.run`: products of segments of rows, stated in one form.

The definition has a weight for each segment as ``[segments, n, k]`` and where segments begin,
whichever way the call gave them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..arguments import check_layout
from ..specs import Const, Tensor, Var
from ..template import TraceTemplate

_INTEGERS = ("int32", "int64")


def _segment_gemm_reference(
    x: torch.Tensor, weights: torch.Tensor, seg_indptr: torch.Tensor
) -> torch.Tensor:
    """out[r] = x[r] W[s]^T for the rows r of segment s; NaN for others. Source: as mm_bf16."""
    out = x.new_full((x.shape[0], weights.shape[1]), float("nan"), dtype=torch.float64)
    bounds = seg_indptr.tolist()
    for segment, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        out[start:end] = x[start:end].double() @ weights[segment].double().T
    return out


def _tensor(run: Mapping[str, Any], name: str, ndim: int, dtypes: tuple[str, ...] = ()) -> Any:
    value = check_tensor(name, run.get(name), ndim)
    if dtypes and str(value.dtype).removeprefix("torch.") not in dtypes:
        raise ValueError(f"`{name}` must have dtype {' or '.join(dtypes)}, got {value.dtype}")
    check_layout(name, "rows" if ndim == 1 else None, value)
    return value


def _gather(run: Mapping[str, Any]) -> dict[str, Any]:
    x, weights = _tensor(run, "x", 2), _tensor(run, "weights", 3)
    if not check_flag("weight_column_major", run["weight_column_major"]):
        weights = weights.mT
    if (run.get("seg_lens") is None) == (run.get("seg_indptr") is None):
        raise ValueError("either `seg_lens` or `seg_indptr` must be given")
    name = "seg_indptr" if run.get("seg_lens") is None else "seg_lens"
    bounds = _tensor(run, name, 1, _INTEGERS)
    segments = check_count("batch_size", run["batch_size"], 0)
    count = segments + (name == "seg_indptr")
    if len(bounds) != count:
        raise ValueError(
            f"`{name}` must have shape [{count}] for `batch_size` {segments}, got "
            f"{list(bounds.shape)}"
        )
    if name == "seg_lens":
        bounds = torch.nn.functional.pad(bounds.cumsum(0), (1, 0))
    if run.get("weight_indices") is not None:
        indices = _tensor(run, "weight_indices", 1, _INTEGERS)
        if len(indices) != segments:
            raise ValueError(
                f"`weight_indices` must have shape [{segments}], got {list(indices.shape)}"
            )
        if segments and not len(weights):
            raise ValueError(f"`weights` must have matrices, got shape {list(weights.shape)}")
        weights = weights[indices.long()]
    return {"x": x, "weights": weights, "seg_indptr": bounds.to(torch.int64), "out": run.get("out")}


segment_gemm_run_trace = TraceTemplate(
    "gemm_bf16",
    axes={
        "m": Var("Rows."),
        "n": Const("Columns of the result.", abbrev="n"),
        "k": Const("Terms of each sum.", abbrev="k"),
        "segments": Var("Segments of rows."),
        "bounds": Var("Segments and one."),
    },
    inputs={
        "x": Tensor(["m", "k"], dtypes=("bfloat16", "float16"), layout="rows"),
        "weights": Tensor(["segments", "n", "k"], dtype_from="x", description="Of each segment."),
        "seg_indptr": Tensor(["bounds"], dtype="int64", description="First row of each segment."),
    },
    outputs={"out": Tensor(["m", "n"], dtype_from="x", layout="rows", param="out")},
    constraints=["bounds == segments + 1"],
    name_prefix="segment_gemm",
    reference=_segment_gemm_reference,
    gather=_gather,
    description="Products of segments of rows with a matrix each.",
)
