"""Templates and references of block-sparse attention: a dense matrix with a mask made of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._common.checks import tensor as check_tensor
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention import _HEAD_RULES, _HEAD_SCALES, _HEADS, by_lse, indices, kv_tensor
from .attention_arguments import (
    _check_planned,
    _in_use,
    _mask_of,
    _split_scales,
    planned_problem,
    predict_planned,
)
from .attention_reference import _attend

Arguments = Mapping[str, Any]


def _dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    sm_scale: float,
    logits_soft_cap: float,
    v_scale: float = 1.0,
    **head_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend(
        q,
        k,
        v,
        seen,
        sm_scale=sm_scale,
        v_scale=v_scale,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode="NONE",
        rope_scale=1.0,
        rope_theta=1e4,
        sinks=None,
        **head_scales,
    )


def _block_sparse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    block_cols: int,
    sm_scale: float,
    causal: bool = False,
    logits_soft_cap: float = 0.0,
    mask: torch.Tensor | None = None,
    v_scale: float = 1.0,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v, where row of blocks i sees the columns of blocks
    indices[indptr[i] : indptr[i + 1]]; of these, where `mask` is given, the entries
    [rows of a block, their columns] that it has for each row of blocks.

    Source: Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM
    Inference Serving", 2025.
    """
    bounds = indptr.tolist()
    block_rows = len(q) // max(len(bounds) - 1, 1)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    offsets = torch.arange(block_cols, device=q.device)
    entry = 0
    for row in range(len(bounds) - 1):
        blocks = indices[bounds[row] : bounds[row + 1]].long()
        columns = (blocks[:, None] * block_cols + offsets).flatten()
        part = torch.ones(block_rows, len(columns), dtype=torch.bool, device=q.device)
        if mask is not None:
            part = mask[entry : entry + part.numel()].view(part.shape)
        entry += part.numel()
        seen[row * block_rows : (row + 1) * block_rows, columns] = part
    if causal:
        seen = seen.tril(len(k) - len(q))
    return _dense_attention(
        q,
        k,
        v,
        seen,
        sm_scale,
        logits_soft_cap,
        v_scale,
        q_head_scale=q_head_scale,
        k_head_scale=k_head_scale,
        v_head_scale=v_head_scale,
    )


def _variable_block_sparse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask_map: torch.Tensor,
    block_row_sz: torch.Tensor,
    block_col_sz: torch.Tensor,
    sm_scale: float,
    causal: bool = False,
    logits_soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v of q[heads, rows, d] and k, v[kv_heads, columns, d];
    block (i, j) of KV head h, block_row_sz[h, i] rows by block_col_sz[h, j] columns, is seen where
    block_mask_map[h, i, j].

    Source: as _block_sparse_reference.
    """
    group = len(q) // len(k)
    o, lse = [], []
    for head in range(len(k)):
        rows, columns = block_row_sz[head].long(), block_col_sz[head].long()
        seen = block_mask_map[head].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        if causal:
            seen = seen.tril(k.shape[1] - q.shape[1])
        queries = q[head * group : (head + 1) * group].transpose(0, 1)
        own_k, own_v = k[head, :, None], v[head, :, None]
        own = _dense_attention(queries, own_k, own_v, seen, sm_scale, logits_soft_cap)
        o.append(own[0].transpose(0, 1))
        lse.append(own[1].transpose(0, 1))
    return torch.cat(o), torch.cat(lse)


def _convert_bsr_mask_layout_reference(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """result = for each row of blocks the entries of its blocks, [nnz, R, C], as [R, nnz * C].

    Source: the layout of block compressed sparse rows, as scipy.sparse.bsr_array has it.
    """
    bounds = indptr.tolist()
    rows = [mask[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return torch.cat([mask.new_empty(0), *(row.transpose(0, 1).flatten() for row in rows)])


def _bsr_init(arguments: dict[str, Any]) -> dict[str, Any]:
    nnz, rows = len(arguments["mask"]), len(arguments["indptr"])
    indptr = torch.linspace(0, nnz, rows).to(torch.int32).to(arguments["mask"].device)
    return {"mask": arguments["mask"].float() > 0, "indptr": indptr}


def _options(run: Arguments, problem: Any) -> dict[str, Any]:
    options = {"sm_scale": problem.spec.sm_scale, "o_dtype": problem.spec.o_data_type}
    if problem.spec.logits_soft_cap > 0.0:
        options["logits_soft_cap"] = problem.spec.logits_soft_cap
    return options | {name: run[name] for name in ("out", "lse", "enable_pdl") if name in run}


def _gather_block_sparse(run: Arguments) -> dict[str, Any]:
    problem, wrapper = planned_problem(run), run["self"]
    q, k, v = (check_tensor(name, run[name], 3) for name in ("q", "k", "v"))
    for tensor in (k, v):
        if tensor.shape[0] != wrapper._shape[1]:
            raise ValueError(f"`k` and `v` must have {wrapper._shape[1]} rows, got {len(tensor)}")
    _check_planned(problem, q, k, v)
    mask = None
    if problem.mask_mode == "custom" and not wrapper._causal:
        mask = _mask_of(problem, problem.requests.qo_lengths() * problem.requests.kv_lengths())
    indptr, columns = wrapper._blocks
    names = ("scale_q", "scale_k", "scale_v")
    scales = wrapper._scales_of_run(*(run.get(name) for name in names))
    named = dict(zip(names, scales, strict=True))
    factor, v_scale, of_heads = _split_scales(named, q, k.shape[1])
    options = _options(run, problem)
    options["sm_scale"] *= factor
    return {
        "q": q,
        "k": k,
        "v": v,
        "indptr": indptr.to(q.device),
        "indices": columns.to(q.device),
        "block_cols": wrapper._block[1],
        "mask": mask,
        "causal": wrapper._causal,
        **_in_use(v_scale=(v_scale, 1.0)),
        **of_heads,
        **options,
    }


def _gather_variable_block_sparse(run: Arguments) -> dict[str, Any]:
    problem, wrapper = planned_problem(run), run["self"]
    q, k, v = (check_tensor(name, run[name], 3) for name in ("q", "k", "v"))
    (qo_heads, kv_heads), (rows, columns) = wrapper._heads, wrapper._lengths
    for name, tensor, dtype, shape in (
        ("q", q, problem.spec.q_data_type, (qo_heads, rows, problem.spec.head_dim_qk)),
        ("k", k, problem.spec.kv_data_type, (kv_heads, columns, problem.spec.head_dim_qk)),
        ("v", v, problem.spec.kv_data_type, (kv_heads, columns, problem.spec.head_dim_qk)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"`{name}` must be {dtype} of shape {list(shape)} as planned, got {tensor.dtype} "
                f"of shape {list(tensor.shape)}"
            )
    blocks, row_sizes, col_sizes = wrapper._blocks
    return {
        "q": q,
        "k": k,
        "v": v,
        "block_mask_map": blocks.to(q.device),
        "block_row_sz": row_sizes.int().to(q.device),
        "block_col_sz": col_sizes.int().to(q.device),
        "causal": wrapper._causal,
        **_options(run, problem),
    }


_FLOAT16 = ("bfloat16", "float16")
_QUERIES = (*_FLOAT16, "float8_e4m3fn", "float8_e5m2")
_LSE = "Base-2 logarithm of the sum of exponentials; -inf: no column."
_SCALARS: dict[str, Value] = {
    "sm_scale": Scalar("float32", description="Factor of the logits."),
    "logits_soft_cap": Scalar("float32", optional=True, above=0, description="cap tanh(x / cap)."),
}


def _results(tokens: list[str], lse: bool) -> dict[str, Value]:
    """`tokens`: axes before the elements of a head."""
    outputs: dict[str, Value] = {
        "output": Tensor(
            [*tokens, "head_dim_vo"], param="out", dtype_from_scalar="o_dtype", dtypes=_FLOAT16
        )
    }
    if lse:
        outputs["lse"] = Tensor(tokens, param="lse", dtype="float32", description=_LSE)
    return outputs


_LENGTHS: dict[str, Axis] = {"M": Var("Rows: queries."), "N": Var("Columns: keys.")}


def _block_sparse_template(*, lse: bool) -> TraceTemplate:
    return TraceTemplate(
        op_type="block_sparse_attention",
        name_prefix="block_sparse_attention_lse" if lse else "block_sparse_attention",
        description="Attention whose logits are a matrix in block compressed sparse rows.",
        axes={
            **_LENGTHS,
            **_HEADS,
            "len_indptr": Var("Rows of blocks + 1."),
            "nnz": Var("Blocks."),
            "mask_size": Var("Entries of all blocks."),
        },
        inputs={
            "q": Tensor(["M", "num_qo_heads", "head_dim_qk"], dtypes=_QUERIES, layout="rows"),
            "k": kv_tensor(["N"]),
            "v": kv_tensor(["N"], "k"),
            "indptr": indices("len_indptr", "First block of each row of blocks."),
            "indices": indices("nnz", "Column of each block, in blocks."),
            "block_cols": Scalar("int32", description="Columns of a block."),
            **_SCALARS,
            "mask": Tensor(
                ["mask_size"],
                dtype="bool",
                optional=True,
                description="Entries that count: of each row of blocks [rows, columns].",
            ),
            "v_scale": Scalar("float32", optional=True, description="Factor of the result."),
            **_HEAD_SCALES,
        },
        outputs=_results(["M", "num_qo_heads"], lse),
        constraints=_HEAD_RULES,
        options={"causal": (False, True)},
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_block_sparse_reference,
        gather=_gather_block_sparse,
        predict=predict_planned,
    )


def _variable_block_sparse_template(*, lse: bool) -> TraceTemplate:
    name = "variable_block_sparse_attention"
    return TraceTemplate(
        op_type="block_sparse_attention",
        name_prefix=f"{name}_lse" if lse else name,
        description="Attention whose logits are sparse in blocks of any sizes, per KV head.",
        axes={
            **_LENGTHS,
            **_HEADS,
            "row_blocks": Var("Rows of blocks."),
            "col_blocks": Var("Columns of blocks."),
        },
        inputs={
            "q": Tensor(["num_qo_heads", "M", "head_dim_qk"], dtypes=_QUERIES, layout="rows"),
            "k": Tensor(["num_kv_heads", "N", "head_dim_qk"], layout="rows"),
            "v": Tensor(["num_kv_heads", "N", "head_dim_vo"], dtype_from="k", layout="rows"),
            "block_mask_map": Tensor(
                ["num_kv_heads", "row_blocks", "col_blocks"],
                dtype="bool",
                description="Blocks that are attended to.",
            ),
            "block_row_sz": Tensor(
                ["num_kv_heads", "row_blocks"], dtype="int32", description="Rows of each block."
            ),
            "block_col_sz": Tensor(
                ["num_kv_heads", "col_blocks"], dtype="int32", description="Columns of each block."
            ),
            **_SCALARS,
        },
        outputs=_results(["num_qo_heads", "M"], lse),
        constraints=_HEAD_RULES,
        options={"causal": (False, True)},
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_variable_block_sparse_reference,
        gather=_gather_variable_block_sparse,
        predict=predict_planned,
    )


convert_bsr_mask_layout_trace = TraceTemplate(
    op_type="convert_bsr_mask_layout",
    description="Mask of a block-sparse matrix, by rows of the matrix in place of by blocks.",
    axes={
        "nnz": Var("Blocks."),
        "block_rows": Const("Rows of a block.", abbrev="r"),
        "block_cols": Const("Columns of a block.", abbrev="c"),
        "len_indptr": Var("Rows of blocks + 1."),
        "mask_size": Var("nnz * block_rows * block_cols.", from_values=True),
    },
    predict=lambda arguments: {"mask_size": arguments["mask"].numel()},
    inputs={
        "mask": Tensor(["nnz", "block_rows", "block_cols"], dtype="bool"),
        "indptr": indices("len_indptr", "First block of each row of blocks."),
    },
    outputs={"output": Tensor(["mask_size"], dtype="bool")},
    constraints=["len_indptr >= 1"],
    tags=["status:verified", "host"],
    reference=_convert_bsr_mask_layout_reference,
    init=_bsr_init,
)
block_sparse_attention_run_trace = by_lse(_block_sparse_template)
variable_block_sparse_attention_run_trace = by_lse(_variable_block_sparse_template)
