"""Products of activations with weights: 16 bits, 8 bits with scales of blocks, 4-bit weights."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import CheckOptions, error_bound, make_tensor

from .base import Arguments, Backend, Flag, Routine, positive, register

_SHAPE = [
    Flag("batch_size", positive, 16, "rows (tokens)"),
    Flag("output_size", positive, 4096, "rows of the weight"),
    Flag("hidden_size", positive, 14336, "elements of a row of the weight"),
]
_FEW = [
    Flag("batch_size", positive, 8, "rows (tokens), at most 8"),
    Flag("output_size", positive, 4096, "columns of the result"),
    Flag("hidden_size", positive, 14336, "rows of the weights"),
]
_FORMATS = {"int4": 128, "mxfp4": 32, "nvfp4": 16}
_SCALE_BLOCK = 128


def _flops(case: Namespace) -> int:
    return int(2 * case.batch_size * case.output_size * case.hidden_size)


def _out(case: Namespace, device: str) -> torch.Tensor:
    return torch.empty(case.batch_size, case.output_size, dtype=torch.bfloat16, device=device)


def _rows(case: Namespace, rows: int, device: str) -> torch.Tensor:
    return make_tensor(rows, case.hidden_size, dtype=torch.bfloat16, device=device)


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b, out=out)


def _build_mm(case: Namespace, device: str) -> Arguments:
    weight = _rows(case, case.output_size, device)
    return {"a": _rows(case, case.batch_size, device), "b": weight.T, "out": _out(case, device)}


def _build_normed(case: Namespace, device: str) -> Arguments:
    """One row, whatever the batch size."""
    dtype, k, n = torch.bfloat16, case.hidden_size, case.output_size
    return {
        "input": make_tensor(1, k, dtype=dtype, device=device),
        "residual": make_tensor(1, k, dtype=dtype, device=device),
        "norm_weight": make_tensor(k, dtype=dtype, device=device),
        "b": make_tensor(k, n, dtype=dtype, device=device),
        "out": torch.empty(1, n, dtype=dtype, device=device),
        "residual_out": torch.empty(1, k, dtype=dtype, device=device),
        "normed_out": torch.empty(1, k, dtype=dtype, device=device),
    }


def _heads(case: Namespace) -> int:
    return int(case.num_qo_heads + 2 * case.num_kv_heads)


def _build_heads(case: Namespace, device: str) -> Arguments:
    """One row; its request has one page."""
    dim = case.head_dim
    row = _build_normed(
        Namespace(hidden_size=case.hidden_size, output_size=dim * _heads(case)), device
    )
    del row["out"]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    cache = torch.zeros(2, 1, 16, case.num_kv_heads, dim, dtype=torch.bfloat16, device=device)
    weights = torch.ones(2, dim, dtype=torch.bfloat16, device=device)
    return {
        **row,
        "cos_sin_cache": torch.ones(64, dim, device=device),
        "pos_ids": zero,
        "paged_kv_cache": tuple(cache.unbind()),
        "kv_indices": zero,
        "kv_indptr": torch.arange(2, dtype=torch.int32, device=device),
        "batch_indices": zero,
        "positions": zero,
        "q_weight": weights[0],
        "k_weight": weights[1],
        "q_out": torch.empty(1, case.num_qo_heads, dim, dtype=torch.bfloat16, device=device),
    }


def _build_route(case: Namespace, device: str) -> Arguments:
    sizes = Namespace(hidden_size=case.hidden_size, output_size=case.num_experts)
    row = _build_normed(sizes, device)
    del row["out"]
    return {**row, "top_k": case.top_k}


def _build_gated(case: Namespace, device: str) -> Arguments:
    dtype, m, k, n = torch.bfloat16, case.batch_size, case.hidden_size, case.output_size
    return {
        "a": make_tensor(m, k, dtype=dtype, device=device),
        "b": make_tensor(k, 2 * n, dtype=dtype, device=device) * k**-0.5,
        "out": torch.empty(m, n, dtype=dtype, device=device),
    }


def _build_before_norm(case: Namespace, device: str) -> Arguments:
    dtype, m, k, n = torch.bfloat16, case.batch_size, case.hidden_size, case.output_size
    return {
        "a": make_tensor(m, k, dtype=dtype, device=device),
        "b": make_tensor(k, n, dtype=dtype, device=device),
        "residual": make_tensor(m, n, dtype=dtype, device=device),
        "norm_weight": make_tensor(n, dtype=dtype, device=device),
        "out": torch.empty(m, n, dtype=dtype, device=device),
    }


def _build_groupwise(case: Namespace, device: str) -> Arguments:
    m, n, blocks = case.batch_size, case.output_size, case.hidden_size // _SCALE_BLOCK
    return {
        "a": _rows(case, m, device).to(torch.float8_e4m3fn),
        "b": _rows(case, n, device).to(torch.float8_e4m3fn),
        "a_scale": torch.rand(m, blocks, device=device),
        "b_scale": torch.rand(-(-n // _SCALE_BLOCK), blocks, device=device),
        "scale_major_mode": "K",
        "out": _out(case, device),
    }


def _build_rounded(case: Namespace, device: str) -> Arguments:
    m, n, k = case.batch_size, 2 * case.intermediate_size, case.hidden_size
    return {
        "input": _rows(case, m, device).to(torch.float8_e4m3fn),
        "weight": _rows(case, n, device).to(torch.float8_e4m3fn),
        "input_scale": torch.rand(m, k // _SCALE_BLOCK, device=device) + 0.5,
        "weight_scale": (torch.rand(n // _SCALE_BLOCK, k // _SCALE_BLOCK, device=device) + 0.5)
        / k**0.5,
        "out": torch.empty(m, n // 2, dtype=torch.float8_e4m3fn, device=device),
        "out_scale": torch.empty(m, n // 2 // _SCALE_BLOCK, device=device),
    }


def _format(text: str) -> str:
    """Format of 4-bit weights."""
    if text not in _FORMATS:
        raise ValueError(f"{text!r} is no format; use one of {', '.join(_FORMATS)}")
    return text


def _build_weight_only(case: Namespace, device: str) -> Arguments:
    n, k = case.output_size, case.hidden_size
    scale = torch.rand(n, k // _FORMATS[case.weight_format], device=device) + 0.5
    if case.weight_format == "mxfp4":
        scale = (scale * 4 + 124).to(torch.uint8)
    else:
        scale = scale.to({"int4": torch.bfloat16}.get(case.weight_format, torch.float8_e4m3fn))
    return {
        "input": _rows(case, case.batch_size, device),
        "weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device),
        "weight_scale": scale,
        "weight_format": case.weight_format,
        "out": _out(case, device),
    }


def _options(largest: float, operations: int) -> CheckOptions:
    """Sums lose what the size of their terms says, not that of their results."""
    return CheckOptions(bound=error_bound(torch.bfloat16, operations=operations, magnitude=largest))


register(
    Routine(
        name="mm_bf16",
        api="flashinfer.gemm:mm_bf16",
        flags=_SHAPE,
        build=_build_mm,
        reads=["a", "b"],
        writes=["out"],
        flops=_flops,
        check_options=lambda template, arguments: _options(
            4.0 * arguments["a"].shape[1] ** 0.5, 64
        ),
        backends={"cuda": Backend("flashinfer.gemm:mm_bf16"), "torch": Backend(_matmul)},
    )
)
register(
    Routine(
        name="add_rmsnorm_mm_bf16",
        api="flashinfer.gemm:add_rmsnorm_mm_bf16",
        flags=[
            Flag("output_size", positive, 5120, "columns of the product"),
            Flag("hidden_size", positive, 2048, "elements of the row, at most 4096"),
        ],
        build=_build_normed,
        reads=["input", "residual", "norm_weight", "b"],
        writes=["out", "residual_out", "normed_out"],
        flops=lambda case: int(2 * case.output_size * case.hidden_size),
        check_options=lambda template, arguments: _options(
            12.0 * arguments["input"].shape[1] ** 0.5, 64
        ),
    )
)
register(
    Routine(
        name="add_rmsnorm_mm_rope_append_bf16",
        api="flashinfer.gemm:add_rmsnorm_mm_rope_append_bf16",
        flags=[
            Flag("hidden_size", positive, 2048, "elements of the row, at most 4096"),
            Flag("num_qo_heads", positive, 32, "heads of queries"),
            Flag("num_kv_heads", positive, 4, "heads of keys and values"),
            Flag("head_dim", positive, 128, "elements of a head, 64 or 128"),
        ],
        build=_build_heads,
        reads=["input", "residual", "norm_weight", "b"],
        writes=["q_out", "residual_out", "normed_out"],
        flops=lambda case: 2 * case.hidden_size * case.head_dim * _heads(case),
        check_options=lambda template, arguments: _options(
            12.0 * arguments["input"].shape[1] ** 0.5, 64
        ),
    )
)
register(
    Routine(
        name="mm_silu_and_mul_bf16",
        api="flashinfer.gemm:mm_silu_and_mul_bf16",
        flags=_FEW,
        build=_build_gated,
        reads=["a", "b"],
        writes=["out"],
        flops=lambda case: int(4 * case.batch_size * case.output_size * case.hidden_size),
        check_options=lambda template, arguments: _options(
            8.0 * arguments["a"].shape[1] ** 0.5, 64
        ),
    )
)
register(
    Routine(
        name="add_rmsnorm_mm_route_bf16",
        api="flashinfer.gemm:add_rmsnorm_mm_route_bf16",
        flags=[
            Flag("hidden_size", positive, 2048, "elements of the row, at most 4096"),
            Flag("num_experts", positive, 128, "columns of the product"),
            Flag("top_k", positive, 8, "experts of the row"),
        ],
        build=_build_route,
        reads=["input", "residual", "norm_weight", "b"],
        writes=["residual_out", "normed_out"],
        flops=lambda case: int(2 * case.num_experts * case.hidden_size),
        check_options=lambda template, arguments: _options(
            12.0 * arguments["input"].shape[1] ** 0.5, 64
        ),
    )
)
register(
    Routine(
        name="mm_add_rmsnorm_bf16",
        api="flashinfer.gemm:mm_add_rmsnorm_bf16",
        flags=_FEW,
        build=_build_before_norm,
        reads=["a", "b", "residual", "norm_weight"],
        writes=["out", "residual"],
        flops=lambda case: int(2 * case.batch_size * case.output_size * case.hidden_size),
        check_options=lambda template, arguments: _options(
            12.0 * arguments["a"].shape[1] ** 0.5, 64
        ),
    )
)
register(
    Routine(
        name="fp8_blockscale_gemm_swiglu_sm90",
        api="flashinfer.gemm:fp8_blockscale_gemm_swiglu_sm90",
        flags=[
            Flag("batch_size", positive, 64, "rows of the left operand"),
            Flag("intermediate_size", positive, 14336, "columns of the result"),
            Flag("hidden_size", positive, 4096, "terms of each sum"),
        ],
        build=_build_rounded,
        reads=["input", "weight", "input_scale", "weight_scale"],
        writes=["out", "out_scale"],
        flops=lambda case: int(4 * case.batch_size * case.intermediate_size * case.hidden_size),
    )
)
register(
    Routine(
        name="gemm_fp8_nt_groupwise",
        api="flashinfer.gemm:gemm_fp8_nt_groupwise",
        flags=_SHAPE,
        build=_build_groupwise,
        reads=["a", "b", "a_scale", "b_scale"],
        writes=["out"],
        flops=_flops,
        check_options=lambda template, arguments: _options(
            4.0 * arguments["a"].shape[1] ** 0.5, 4096
        ),
    )
)
register(
    Routine(
        name="weight_only_linear",
        api="flashinfer.gemm:weight_only_linear",
        flags=[*_SHAPE, Flag("weight_format", _format, "int4", "format: int4, mxfp4 or nvfp4")],
        build=_build_weight_only,
        reads=["input", "weight", "weight_scale"],
        writes=["out"],
        flops=_flops,
        check_options=lambda template, arguments: _options(
            64.0 * arguments["input"].shape[1] ** 0.5, 64
        ),
    )
)
