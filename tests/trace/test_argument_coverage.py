"""Every optional argument of every operation changes a result, receives it, or is refused.

The arguments are read off the signatures: an operation with a new optional argument fails here
until `CASES` says what the argument does, and the case shows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments
from tests.trace import (
    attention_cases,
    attention_wrapper_cases,
    cache_cases,
    linear_attention_cases,
    mhc_cases,
    mla_cases,
    moe_cases,
    mqa_cases,
    norm_cases,
    sampling_cases,
    segment_cases,
    table_cases,
    topk_varlen_cases,
)
from tests.trace.calls import Operation, operations, parameters_of

OPTIONAL = [
    (operation, name)
    for operation in operations()
    for name, parameter in parameters_of(operation.function).items()
    if parameter.default is not inspect.Parameter.empty
]


def _call(operation: Operation, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything that one call returns or writes."""
    mine = clone_arguments(arguments)
    returned = operation.api(**mine)
    tensors = {name: value for name, value in mine.items() if isinstance(value, torch.Tensor)}
    if isinstance(returned, tuple):
        return tensors | {f"returned[{i}]": value for i, value in enumerate(returned)}
    return tensors if returned is None else {**tensors, "returned": returned}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name].float(), second[name].float()) for name in first)


def changes_the_result(value: Any) -> Callable[..., None]:
    """Another value than the default gives another result, and the default is the default."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        default = parameters_of(operation.function)[name].default
        usual = _call(operation, arguments)
        assert _same(usual, _call(operation, {**arguments, name: default}))
        assert not _same(usual, _call(operation, {**arguments, name: value}))

    return case


def is_refused_beyond_the_listed(
    operation: Operation, name: str, arguments: dict[str, Any]
) -> None:
    """A value that the template does not list is refused, by name."""
    assert name in operation.template.options
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: "another"})


def chooses(value: Any) -> Callable[..., None]:
    """`value` gives another result; what the template does not list is refused."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        if value in operation.template.options[name]:
            usual = _call(operation, arguments)
            changed = _call(operation, {**arguments, name: value})
            assert any(
                usual[key].shape != changed[key].shape
                or not torch.equal(usual[key].float(), changed[key].float())
                for key in usual
            )
        is_refused_beyond_the_listed(operation, name, arguments)

    return case


def is_a_block_size(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Sizes that do not divide the rows, or that there are no kernels for, are refused."""
    for value in (7, 0):
        with pytest.raises((TypeError, ValueError), match=name):
            operation.api(**{**arguments, name: value})


def receives_the_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The tensor given is what is returned, and holds the result."""
    usual = _call(operation, arguments)["returned"]
    destination = torch.full_like(usual, float("nan") if usual.is_floating_point() else -7)
    returned = operation.api(**clone_arguments(arguments), **{name: destination})
    assert returned is destination
    assert torch.equal(destination, usual)
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination[:-1]})
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination.double()})


def receives(index: int) -> Callable[..., None]:
    """A destination of one of several results."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = operation.api(**clone_arguments(arguments))[index]
        given = torch.full_like(usual, float("nan"))
        assert operation.api(**clone_arguments(arguments), **{name: given})[index] is given
        assert torch.equal(given, usual)
        for wrong in (given.double(), given[:, :-1]):
            with pytest.raises(ValueError, match=name):
                operation.api(**arguments, **{name: wrong})

    return case


def receives_scales(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A destination of scales where the operation has them as a result."""
    if name not in operation.template.outputs:
        is_refused_beyond_the_listed(operation, name, arguments)
        return
    usual = operation.api(**arguments)[1]
    given = torch.full_like(usual, float("nan"))
    assert operation.api(**clone_arguments(arguments), **{name: given})[1] is given
    assert torch.equal(given, usual)
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: given.double()})


def is_a_hint(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Changes how the kernel is launched, no bit of a result; what is no bool is refused."""
    assert name in operation.template.hints
    usual = _call(operation, arguments)
    for value in (True, False):
        assert _same(usual, _call(operation, {**arguments, name: value}))
    for value in ("yes", 1, 0.0):
        with pytest.raises(TypeError, match=name):
            operation.api(**{**arguments, name: value})


def adds_to_the_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A vector of zeros is what None means; another one counts."""
    usual = _call(operation, {**arguments, name: None})
    result = next(usual[key] for key in ("returned", "returned[0]", "out") if key in usual)
    zeros = result.new_zeros(result.shape[-1])
    assert _same(
        usual, {k: v for k, v in _call(operation, {**arguments, name: zeros}).items() if k in usual}
    )
    changed = _call(operation, {**arguments, name: zeros + 1})
    assert not _same(usual, {k: v for k, v in changed.items() if k in usual})


def adds_to_the_product(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A vector of zeros for the columns of the product is what None means; another one counts."""
    b = arguments["b"]
    usual = _call(operation, arguments)
    shared = {**usual, name: torch.zeros_like(b[0])}
    assert _same(shared, _call(operation, {**arguments, name: torch.zeros_like(b[0])}))
    some = torch.arange(b.shape[1], device=b.device).to(b.dtype)
    assert not _same(usual, _call(operation, {**arguments, name: some}))
    for wrong in (some[:-8], some.float()):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


def scales_the_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A global scale of one is what None means; another one counts."""
    usual = _call(operation, {**arguments, name: None})
    one = torch.ones(1, device=next(iter(usual.values())).device)
    assert _same(usual, _call(operation, {**arguments, name: one}))
    assert not _same(usual, _call(operation, {**arguments, name: one * 1.25}))


def is_a_factor(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Twice the scale gives another result; none, where one is needed, is refused."""
    usual = _call(operation, arguments)
    assert not _same(usual, _call(operation, {**arguments, name: 2 * arguments[name]}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: None})


def is_a_dtype(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The dtype that None means can be said; others are refused, by their name or the result's."""
    usual = _call(operation, arguments)
    assert _same(usual, _call(operation, {**arguments, name: usual["returned"].dtype}))
    for wrong in (torch.int8, "another"):
        with pytest.raises((TypeError, ValueError), match=name.removesuffix("_dtype")):
            operation.api(**{**arguments, name: wrong})


def belongs_to_8_bits(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The scale of an 8-bit result: another one counts, and other results refuse it."""
    one = torch.ones(1, device=arguments["a"].device)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: one})
    rounded = {**arguments, "out_dtype": torch.float8_e4m3fn}
    usual = _call(operation, {**rounded, name: one})
    assert not _same(usual, _call(operation, {**rounded, name: 2 * one}))


CASES: dict[str, Callable[..., None]] = {
    "alignment": is_a_block_size,
    "alpha": scales_the_result,
    "config": is_refused_beyond_the_listed,
    "launch_with_pdl": is_a_hint,
    "qkv_scale": is_refused_beyond_the_listed,
    "validate_indices": is_a_hint,
    "backend": is_refused_beyond_the_listed,
    "bitorder": changes_the_result("little"),
    "block_scale": is_refused_beyond_the_listed,
    "column_major_scales": is_refused_beyond_the_listed,
    "do_shuffle": is_refused_beyond_the_listed,
    "dst_dtype": is_refused_beyond_the_listed,
    "expanded_idx_to_permuted_idx": is_refused_beyond_the_listed,
    "global_scale": scales_the_result,
    "global_scale_tensor": scales_the_result,
    "group_size": is_a_block_size,
    "input_scale": is_a_factor,
    "is_global_scale_inversed": is_refused_beyond_the_listed,
    "is_sf_8x4_layout": is_refused_beyond_the_listed,
    "is_sf_swizzled_layout": is_refused_beyond_the_listed,
    "nvfp4_4over6": is_refused_beyond_the_listed,
    "out_dtype": is_a_dtype,
    "output_dtype": is_a_dtype,
    "out_scale": receives_scales,
    "per_token_activation": is_refused_beyond_the_listed,
    "bias": adds_to_the_result,
    "mma_sm": is_refused_beyond_the_listed,
    "pdl": is_a_hint,
    "scale_granularity_mnk": is_refused_beyond_the_listed,
    "scale_major_mode": is_refused_beyond_the_listed,
    "segment_alignment": is_refused_beyond_the_listed,
    "tactic": is_refused_beyond_the_listed,
    "use_pdl": is_a_hint,
    "weight_ready": is_a_hint,
    "scale_tma_aligned": is_refused_beyond_the_listed,
    "scale_ue8m0": chooses(True),
    "sfLayout": is_refused_beyond_the_listed,
    "sf_swizzle_layout": is_refused_beyond_the_listed,
    "sf_use_ue8m0": chooses(True),
    "sf_vec_size": is_a_block_size,
    "ufp8_type": chooses(0),
    "weight_scale": is_a_factor,
    "eps": changes_the_result(5.0),
    "weight_bias": chooses(1.0),
    "out": receives_the_result,
    "enable_pdl": is_a_hint,
    "expected_m": moe_cases.CASES["expected_m"],
    **mqa_cases.CONCAT_CASES,
    **sampling_cases.CASES,
    **cache_cases.CASES,
    "output_quant_scale": lambda operation, *rest: (
        belongs_to_8_bits
        if operation.template.op_type == "gemm_fp8"
        else cache_cases.CASES["output_quant_scale"]
    )(operation, *rest),
    "page_size": lambda operation, *rest: (
        sampling_cases if operation.template.op_type == "topk" else cache_cases
    ).CASES["page_size"](operation, *rest),
}

GATED_CASES = CASES | {"out": receives(0), "out_scale": receives(1)}
SUM_CASES = CASES | {"out": receives(0), "residual_out": receives(1), "normed_out": receives(2)}
HEAD_CASES = SUM_CASES | {
    "bias": adds_to_the_product,
    "head_eps": changes_the_result(5.0),
    "q_out": receives(0),
}
ROUTE_CASES = CASES | {
    "bias": adds_to_the_product,
    "renormalize": changes_the_result(False),
    "residual_out": receives(3),
    "normed_out": receives(4),
    "routed_scaling_factor": changes_the_result(2.5),
}


@pytest.mark.parametrize(
    ("operation", "name"), OPTIONAL, ids=[f"{o.function.__name__}-{n}" for o, n in OPTIONAL]
)
def test_optional_argument(operation: Operation, name: str, device: torch.device):
    if device.type == "cuda" and operation.function.__module__.startswith("flashinfer.cute_dsl"):
        pytest.skip("tests/norm and tests/moe call these kernels, at sizes compiled elsewhere")
    is_attention = operation.template.op_type.startswith(("gqa", "block_sparse_attention"))
    general = attention_cases.CASES if is_attention else CASES
    if operation.template.op_type in linear_attention_cases.OP_TYPES:
        general = linear_attention_cases.CASES
    if operation.template.op_type in mqa_cases.OP_TYPES:
        general = mqa_cases.CASES
    if operation.template.op_type in topk_varlen_cases.OP_TYPES:
        general = topk_varlen_cases.CASES
    if operation.template.op_type in mhc_cases.OP_TYPES:
        general = mhc_cases.CASES
    if operation.template.op_type in norm_cases.OP_TYPES:
        general = norm_cases.CASES
    if operation.template.op_type in moe_cases.OP_TYPES:
        general = moe_cases.CASES
    planned = {**attention_wrapper_cases.CASES, **mla_cases.CASES, **segment_cases.CASES}
    planned |= table_cases.CASES | {
        "add_rmsnorm_mm_bf16": SUM_CASES,
        "add_rmsnorm_mm_rope_append_bf16": HEAD_CASES,
        "add_rmsnorm_mm_route_bf16": ROUTE_CASES,
        "fp8_blockscale_gemm_swiglu_sm90": GATED_CASES,
    }
    cases = planned.get(operation.function.__qualname__, general)
    assert name in cases, f"say in CASES what {name} of {operation.label} does"
    cases[name](operation, name, operation.arguments(device=device))


def test_optional_arguments_are_found():
    """Eleven operations: eight with eps, five with out (layernorm allocates), nine with a hint."""
    counts = {name: sum(n == name for _, n in OPTIONAL) for _, name in OPTIONAL}
    assert counts["eps"] >= 8 and counts["out"] >= 5 and counts["enable_pdl"] >= 9
    assert {*CASES, *attention_cases.CASES} <= set(counts), "no case without an argument"
