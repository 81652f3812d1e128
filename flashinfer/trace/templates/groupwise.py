"""Templates and references of products in groups, and of 8-bit products with scales of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_HALF = ("bfloat16", "float16")


def _spread(scale: torch.Tensor, rows: int, per_row: bool) -> torch.Tensor:
    """[.., rows, k / 128] scales, of rows or of 128 of them, as [.., rows, k] factors."""
    if not per_row:
        scale = scale.repeat_interleave(128, dim=-2)[..., :rows, :]
    return scale.double().repeat_interleave(128, dim=-1)


def _scaled(x: torch.Tensor, scale: torch.Tensor, per_row: bool, mode: str = "K") -> torch.Tensor:
    if mode == "MN":
        scale = scale.transpose(-1, -2)[..., : x.shape[-2] if per_row else None, :]
    return x.double() * _spread(scale, x.shape[-2], per_row)


def _gemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = None,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
) -> torch.Tensor:
    """out = (a a_scale) (b b_scale)^T, with the scales of 128 elements spread over them.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    mode = scale_major_mode or "K"
    left = _scaled(a, a_scale, scale_granularity_mnk[0] == 1, mode)
    return left @ _scaled(b, b_scale, False, mode).T


def _gemm_fp8_nt_blockscaled_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = "MN",
) -> torch.Tensor:
    """out = a b^T, with a scale per 128 x 128 elements of both. Source: as groupwise."""
    mode = scale_major_mode or "K"
    return _scaled(a, a_scale, False, mode) @ _scaled(b, b_scale, False, mode).T


def _by_group(a: torch.Tensor, b: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Rows bounds[g] to bounds[g + 1] of a times b[g]^T; NaN for rows of no group."""
    out = a.new_full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.float64)
    for g, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        out[begin:end] = a[begin:end] @ b[g].T
    return out


def _group_gemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_major_mode: str = "MN",
) -> torch.Tensor:
    """out = a b[g]^T for the rows of each group g. Source: as gemm_fp8_nt_groupwise."""
    left = _scaled(a, a_scale, True, scale_major_mode)
    return _by_group(left, _scaled(b, b_scale, False, scale_major_mode), m_indptr.tolist())


def _group_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
) -> torch.Tensor:
    """out[r] = a[r] b[m_indices[r]]^T. Source: as gemm_fp8_nt_groupwise."""
    left, right = _scaled(a, a_scale, True), _scaled(b, b_scale, False)
    result = left.new_full((a.shape[0], b.shape[1]), float("nan"))
    for g in range(b.shape[0]):
        rows = m_indices == g
        result[rows] = left[rows] @ right[g].T
    return result


def _batch_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
) -> torch.Tensor:
    """out[g] = a[g] b[g]^T; NaN for rows beyond the count. Source: as gemm_fp8_nt_groupwise."""
    result = _scaled(a, a_scale, True) @ _scaled(b, b_scale, False).transpose(1, 2)
    rows = torch.arange(a.shape[1], device=a.device)
    result[rows[None, :] >= masked_m[:, None]] = float("nan")
    return result


def _grouped_mm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
) -> torch.Tensor:
    """out[r] = a[r] b[g]^T for the rows r of each group g. Source: as mm_bf16."""
    return _by_group(a.double(), b.double(), m_indptr.tolist())


def _axes(**more: Any) -> dict[str, Any]:
    return {
        "m": Var("Rows of the left operand."),
        "n": Const("Rows of each right operand.", abbrev="n"),
        "k": Const("Terms of each sum.", abbrev="k"),
        **more,
    }


_K_BLOCKS = Const("Blocks of 128 along k.", abbrev="", derive=lambda sizes: sizes["k"] // 128)
_N_BLOCKS = Const("Blocks of 128 along n.", abbrev="", derive=lambda sizes: -(-sizes["n"] // 128))
_GROUPS = Const("Matrices of the right operand.", abbrev="g")
_OUT = Tensor(
    ["m", "n"],
    dtype_from_scalar="out_dtype",
    dtype_default="bfloat16",
    dtypes=_HALF,
    param="out",
    layout="rows",
)


def _operands(*groups: str, batched: bool = False) -> dict[str, Value]:
    left = ["groups", "m", "k"] if batched else ["m", "k"]
    return {
        "a": Tensor(left, dtypes=_FP8, layout="rows", description="Left operand."),
        "b": Tensor([*groups, "n", "k"], dtypes=_FP8, layout="rows", description="Right operand."),
    }


def _scales(mode: str, rows: str, *groups: str, batched: bool = False) -> dict[str, Value]:
    def dims(*names: str) -> list[str]:
        return list(names[::-1] if mode == "MN" else names)

    left = ["groups", *dims(rows, "k_blocks")] if batched else dims(rows, "k_blocks")
    text = "Factors of 128 elements of"
    return {
        "a_scale": Tensor(left, dtype="float32", description=f"{text} a."),
        "b_scale": Tensor(
            [*groups, *dims("n_blocks", "k_blocks")], dtype="float32", description=f"{text} b."
        ),
    }


def _example(
    device: torch.device, mode: str = "K", rows: int = 130, groups: int = 0, batched: bool = False
) -> dict[str, torch.Tensor]:
    """Operands with k of 256 and their scales; `rows` of the left one that have scales."""
    generator = torch.Generator().manual_seed(1)
    right, left = [groups] if groups else [], [groups] if batched else []
    shapes = {"a": (*left, 130, 256), "b": (*right, 72, 256)}
    scales = {"a_scale": (*left, rows, 2), "b_scale": (*right, 1, 2)}
    result = {
        name: torch.randn(shape, generator=generator).to(device, torch.float8_e4m3fn)
        for name, shape in shapes.items()
    }
    for name, shape in scales.items():
        scale = (torch.rand(shape, generator=generator) + 0.5).to(device)
        result[name] = scale.transpose(-1, -2).contiguous() if mode == "MN" else scale
    return result


@functools.cache
def _dense_template(prefix: str, mode: str, by_block: bool) -> TraceTemplate:
    m_scales = Var("Rows, or blocks of 128 rows, of the left operand that have scales.")
    blockscaled = prefix == "gemm_fp8_nt_blockscaled"
    options: dict[str, tuple[Any, ...]] = {
        "scale_major_mode": (mode,),
        "mma_sm": (1, 2),
    }
    if not blockscaled:
        options["scale_granularity_mnk"] = ((128 if by_block else 1, 128, 128),)
        options["backend"] = ("cutlass", "cutile")

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        example = _example(arguments["a"].device, mode, 2 if by_block else 130)
        more: dict[str, Any] = {"scale_major_mode": mode}
        if not blockscaled:
            more["scale_granularity_mnk"] = (128 if by_block else 1, 128, 128)
        return {**example, **more}

    return TraceTemplate(
        "gemm_fp8",
        axes=_axes(m_scales=m_scales, k_blocks=_K_BLOCKS, n_blocks=_N_BLOCKS),
        inputs={**_operands(), **_scales(mode, "m_scales")},
        outputs={"out": _OUT},
        name_prefix=f"{prefix}_{mode.lower()}" + ("_by_block" if by_block else ""),
        reference=_gemm_fp8_nt_blockscaled_reference
        if blockscaled
        else _gemm_fp8_nt_groupwise_reference,
        init=init,
        options=options,
        description="Product of 8-bit matrices with scales of blocks of 128 elements along k.",
    )


def _dispatch(
    choose: Callable[[dict[str, Any]], TraceTemplate], templates: list[TraceTemplate]
) -> Callable[..., TraceTemplate]:
    def dispatch(**arguments: Any) -> TraceTemplate:
        return choose(arguments)

    dispatch.templates = templates  # type: ignore[attr-defined]
    return dispatch


def _mode(arguments: dict[str, Any], default: str) -> str:
    mode = arguments.get("scale_major_mode", default)
    return mode if mode in ("MN", "K") else default


def _is_by_block(arguments: dict[str, Any]) -> bool:
    return tuple(arguments.get("scale_granularity_mnk") or (1,))[0] == 128


_GROUPWISE, _BLOCKSCALED = "gemm_fp8_nt_groupwise", "gemm_fp8_nt_blockscaled"
gemm_fp8_nt_groupwise_trace = _dispatch(
    lambda call: _dense_template(_GROUPWISE, _mode(call, "K"), _is_by_block(call)),
    [_dense_template(_GROUPWISE, mode, block) for mode in ("K", "MN") for block in (False, True)],
)
gemm_fp8_nt_blockscaled_trace = _dispatch(
    lambda call: _dense_template(_BLOCKSCALED, _mode(call, "MN"), True),
    [_dense_template(_BLOCKSCALED, mode, True) for mode in ("MN", "K")],
)


def _indices(name: str, *dims: str) -> Tensor:
    return Tensor(list(dims), dtypes=("int32", "int64"), layout="rows", description=name)


@functools.cache
def _group_template(mode: str) -> TraceTemplate:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        example: dict[str, Any] = _example(arguments["a"].device, mode, groups=3)
        bounds = torch.tensor([0, 5, 5, 130], dtype=torch.int32, device=arguments["a"].device)
        return {**example, "m_indptr": bounds, "scale_major_mode": mode}

    return TraceTemplate(
        "gemm_fp8",
        axes=_axes(
            groups=_GROUPS,
            bounds=Const("Groups and one.", abbrev="", derive=lambda sizes: sizes["groups"] + 1),
            k_blocks=_K_BLOCKS,
            n_blocks=_N_BLOCKS,
        ),
        inputs={
            **_operands("groups"),
            **_scales(mode, "m", "groups"),
            "m_indptr": _indices("First row of each group, and the end of the last.", "bounds"),
        },
        outputs={"out": _OUT},
        constraints=["bounds == groups + 1"],
        name_prefix=f"group_gemm_fp8_nt_groupwise_{mode.lower()}",
        reference=_group_gemm_fp8_nt_groupwise_reference,
        init=init,
        options={
            "scale_granularity_mnk": ((1, 128, 128),),
            "scale_major_mode": (mode,),
            "mma_sm": (1, 2),
            "backend": ("trtllm", "cutile"),
            "segment_alignment": (1, 4, 8, 128),
        },
        description="Products of groups of rows with a matrix each, 8 bits, scales of blocks.",
    )


group_gemm_fp8_nt_groupwise_trace = _dispatch(
    lambda call: _group_template(_mode(call, "MN")), [_group_template(m) for m in ("MN", "K")]
)


def _deepgemm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["a"].device
    numbers = torch.zeros(130, dtype=torch.int32, device=device)
    numbers[128:] = 2
    return {**_example(device, groups=3), "m_indices": numbers}


def _indices_template(name: str) -> TraceTemplate:
    return TraceTemplate(
        "gemm_fp8",
        axes=_axes(groups=_GROUPS, k_blocks=_K_BLOCKS, n_blocks=_N_BLOCKS),
        inputs={
            **_operands("groups"),
            **_scales("K", "m", "groups"),
            "m_indices": _indices("Matrix of b of each row, the same for 128 rows.", "m"),
        },
        outputs={"out": _OUT},
        name_prefix=name,
        reference=_group_deepgemm_fp8_nt_groupwise_reference,
        init=_deepgemm_init,
        options={"scale_granularity_mnk": ((1, 128, 128),)},
        hints=["validate_indices"] if name.endswith("contiguous") else [],
        description="Products of rows with the matrix that their number names, 8 bits.",
    )


group_deepgemm_fp8_nt_groupwise_trace = _indices_template("group_deepgemm_fp8_nt_groupwise")
group_gemm_fp8_nt_groupwise_contiguous_trace = _indices_template(
    "group_gemm_fp8_nt_groupwise_contiguous"
)


def _masked_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["a"].device
    counts = torch.full((3,), 130, dtype=torch.int32, device=device)
    return {**_example(device, groups=3, batched=True), "masked_m": counts, "expected_m": 130}


batch_deepgemm_fp8_nt_groupwise_trace = TraceTemplate(
    "gemm_fp8",
    axes=_axes(groups=_GROUPS, k_blocks=_K_BLOCKS, n_blocks=_N_BLOCKS),
    inputs={
        **_operands("groups", batched=True),
        **_scales("K", "m", "groups", batched=True),
        "masked_m": _indices("Rows of each matrix that are computed.", "groups"),
        "expected_m": Scalar(
            "int32", minimum=1, description="Rows that a matrix typically has: a hint."
        ),
    },
    outputs={
        "out": Tensor(
            ["groups", "m", "n"],
            dtype_from_scalar="out_dtype",
            dtype_default="bfloat16",
            dtypes=_HALF,
            layout="rows",
            param="out",
        )
    },
    name_prefix="batch_deepgemm_fp8_nt_groupwise",
    reference=_batch_deepgemm_fp8_nt_groupwise_reference,
    init=_masked_init,
    options={"scale_granularity_mnk": ((1, 128, 128),), "backend": ("deepgemm",)},
    description="Products of the first rows of each matrix of a batch, 8 bits.",
)


def _grouped_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["a"].device, torch.Generator().manual_seed(1)
    a, b = torch.randn(50, 64, generator=generator), torch.randn(3, 40, 64, generator=generator)
    bounds = torch.tensor([0, 5, 5, 50], dtype=torch.int32, device=device)
    dtype = torch.float16 if arguments["a"].dtype == torch.float16 else torch.bfloat16
    return {"a": a.to(device, dtype), "b": b.to(device, dtype), "m_indptr": bounds}


grouped_mm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes=_axes(
        groups=_GROUPS,
        bounds=Const("Groups and one.", abbrev="", derive=lambda sizes: sizes["groups"] + 1),
    ),
    inputs={
        "a": Tensor(["m", "k"], dtypes=_HALF, layout="rows", description="Left operand."),
        "b": Tensor(["groups", "n", "k"], dtype_from="a", layout="rows", description="Right ones."),
        "m_indptr": _indices("First row of each group, and the end of the last.", "bounds"),
    },
    outputs={
        "out": Tensor(
            ["m", "n"],
            dtype_from_scalar="out_dtype",
            dtypes=(*_HALF, "float32"),
            layout="rows",
            param="out",
        )
    },
    constraints=["bounds == groups + 1"],
    name_prefix="grouped_mm_bf16",
    reference=_grouped_mm_bf16_reference,
    init=_grouped_init,
    options={"backend": ("cudnn", "auto"), "tactic": (-1,)},
    description="Products of groups of rows with a matrix each.",
)
