"""What kernels read in one dtype is taken in others of its kind, and gives the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._common.conversions import as_dtype, converted, is_convertible


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _append() -> dict[str, Any]:
    return {
        "append_key": torch.randn(3, 2, 64).half(),
        "append_value": torch.randn(3, 2, 64).half(),
        "batch_indices": _ints(0, 0, 1),
        "positions": _ints(3, 4, 1),
        "paged_kv_cache": torch.zeros(4, 2, 4, 2, 64).half(),
        "kv_indices": _ints(2, 0, 3),
        "kv_indptr": _ints(0, 2, 3),
        "kv_last_page_len": _ints(1, 2),
    }


def _append_mla() -> dict[str, Any]:
    call = _append()
    for name in ("append_key", "append_value", "paged_kv_cache"):
        del call[name]
    rows = {"append_ckv": torch.randn(3, 512).half(), "append_kpe": torch.randn(3, 64).half()}
    caches = {"ckv_cache": torch.zeros(4, 4, 512).half(), "kpe_cache": torch.zeros(4, 4, 64).half()}
    return {**call, **rows, **caches}


def _rope() -> dict[str, Any]:
    q, k = torch.randn(5, 4, 64).half(), torch.randn(5, 2, 64).half()
    return {"q": q, "k": k, "indptr": _ints(0, 2, 5), "offsets": _ints(7, 1)}


def _rope_append() -> dict[str, Any]:
    float8 = torch.float8_e4m3fn
    angles = torch.arange(50.0)[:, None] / torch.arange(1.0, 33.0)
    heads = {"q_rope": 4, "k_rope": 2, "q_nope": 4, "k_nope": 2, "v": 2}
    widths = {"q_rope": 64, "k_rope": 64, "q_nope": 64, "k_nope": 64, "v": 128}
    call = _append()
    table = ("kv_indices", "kv_indptr", "batch_indices", "positions")
    return {
        **{name: torch.randn(3, heads[name], widths[name]).half() for name in heads},
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
        "pos_ids": _ints(3, 4, 1),
        "paged_kv_cache": tuple(torch.zeros(4, 4, 2, 128).to(float8) for _ in range(2)),
        **{name: call[name] for name in table},
        "page_size": 4,
    }


def _rope_append_norms() -> dict[str, Any]:
    call = _rope_append()
    rows = {name: call.pop(f"{name}_rope") for name in ("q", "k")}
    del call["q_nope"], call["k_nope"]
    caches = tuple(torch.zeros(4, 4, 2, width).half() for width in (64, 128))
    return {**call, **rows, "paged_kv_cache": caches}


def _states() -> dict[str, Any]:
    v_a, v_b = torch.randn(2, 3, 4, 64).half()
    # Exact in every floating dtype, so that the result does not depend on it.
    s_a, s_b = torch.randint(-4, 4, (2, 3, 4)).float()
    return {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}


def _in_place() -> dict[str, Any]:
    names = {"v_a": "v", "s_a": "s", "v_b": "v_other", "s_b": "s_other"}
    return {names[name]: tensor for name, tensor in _states().items()}


def _stacked() -> dict[str, Any]:
    return {"v": torch.randn(3, 5, 4, 64).half(), "s": torch.randint(-4, 4, (3, 5, 4)).float()}


def _drafts() -> dict[str, Any]:
    def counts() -> torch.Tensor:
        return torch.ones(2, dtype=torch.int32)

    return {
        "draft_probs": torch.full((2, 3, 8), 0.125),
        "draft_token_ids": torch.arange(6, dtype=torch.int32).view(2, 3),
        "target_probs": torch.full((2, 4, 8), 0.125),
        "maybe_output_accepted_token_num": counts(),
        "maybe_output_emitted_draft_token_num": counts(),
        "seed": 3,
        "offset": 0,
    }


def _positions() -> dict[str, Any]:
    return {"append_indptr": _ints(0, 2, 3), "seq_lens": _ints(5, 2), "nnz": 3}


def _lengths() -> dict[str, Any]:
    return {"kv_indptr": _ints(0, 2, 3), "kv_last_page_len": _ints(1, 2), "page_size": 4}


def _fp4() -> dict[str, Any]:
    return {"input": torch.randn(4, 64).half(), "global_scale": torch.tensor([2.0])}


def _norm() -> dict[str, Any]:
    out = torch.empty(4, 64, dtype=torch.float8_e4m3fn)
    tensors = {"input": torch.randn(4, 64).half(), "weight": torch.ones(64).half()}
    return {"out": out, **tensors, "scale": torch.tensor([0.5])}


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "append_paged_kv_cache": (
        _append,
        ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"),
    ),
    "append_paged_mla_kv_cache": (
        _append_mla,
        ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"),
    ),
    "get_batch_indices_positions": (_positions, ("append_indptr", "seq_lens")),
    "get_seq_lens": (_lengths, ("kv_indptr", "kv_last_page_len")),
    "apply_rope": (_rope, ("indptr", "offsets")),
    "apply_llama31_rope_inplace": (_rope, ("indptr", "offsets")),
    "rope.rope_quantize_fp8_append_paged_kv_cache": (
        _rope_append,
        ("kv_indices", "kv_indptr", "batch_indices", "positions"),
    ),
    "rope.rope_append_paged_kv_cache": (
        _rope_append_norms,
        ("kv_indices", "kv_indptr", "batch_indices", "positions"),
    ),
    "merge_state": (_states, ("s_a", "s_b")),
    "merge_state_in_place": (_in_place, ("s", "s_other")),
    "merge_states": (_stacked, ("s",)),
    "chain_speculative_sampling": (
        _drafts,
        (
            "draft_probs",
            "target_probs",
            "draft_token_ids",
            "maybe_output_accepted_token_num",
            "maybe_output_emitted_draft_token_num",
        ),
    ),
    "fp4_quantize": (_fp4, ("global_scale",)),
    "norm.rmsnorm_quant": (_norm, ("scale",)),
}
CASES = [(function, name) for function, (_, names) in CALLS.items() for name in names]
INTEGERS = (torch.int64, torch.uint32, torch.int16)
FLOATS = (torch.bfloat16, torch.float16, torch.float64)


def _api(name: str) -> Callable[..., Any]:
    found: Any = flashinfer
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _others(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
    return FLOATS if tensor.is_floating_point() else INTEGERS


@pytest.mark.parametrize(("function", "name"), CASES)
def test_the_result_does_not_depend_on_the_dtype(function: str, name: str, seed: int):
    build, _ = CALLS[function]
    with flashinfer.reference_backend():
        torch.manual_seed(seed)
        usual = build()
        expected = _api(function)(**usual)
        for dtype in _others(build()[name]):
            torch.manual_seed(seed)
            call = build()
            call[name] = call[name].to(dtype)
            result = _api(function)(**call)
            assert call[name].dtype == dtype
            _assert_same(result, expected)
            _assert_same(list(call.values()), list(usual.values()))


def _assert_same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, (tuple, list)):
        for one, other in zip(got, wanted, strict=True):
            _assert_same(one, other)
    elif isinstance(wanted, torch.Tensor):
        # A count in 16 bits, or a log-sum-exp, is rounded to the dtype that it was given in.
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-2, atol=1e-2)
    else:
        assert got == wanted


@pytest.mark.compiler
@pytest.mark.usefixtures("bindings_on_the_cpu")
@pytest.mark.parametrize(("function", "name"), CASES)
def test_bindings_get_the_dtype_that_they_read(function: str, name: str):
    build, _ = CALLS[function]
    for dtype in (build()[name].dtype, *_others(build()[name])):
        call = build()
        call[name] = call[name].to(dtype)
        with pytest.raises(ValueError, match="must be a CUDA tensor"):
            _api(function)(**call)


@pytest.mark.compiler
@pytest.mark.usefixtures("bindings_on_the_cpu")
@pytest.mark.parametrize(("function", "name"), CASES)
def test_another_kind_of_number_is_refused(function: str, name: str):
    call = CALLS[function][0]()
    other = torch.int32 if call[name].is_floating_point() else torch.float32
    for dtype in (other, torch.bool):
        call[name] = call[name].to(dtype)
        with pytest.raises(ValueError, match=f"`{name}` must have dtype"):
            _api(function)(**call)


def test_an_index_that_int32_does_not_hold_stays_out_of_range():
    wide = torch.tensor([2**40 + 1, -(2**40), 7])
    assert as_dtype(wide, torch.int32).tolist() == [2**31 - 1, -(2**31), 7]
    call = _append()
    call["batch_indices"] = torch.tensor([0, 2**32, 1])  # 0 in 32 bits
    with flashinfer.reference_backend():
        flashinfer.append_paged_kv_cache(**call)
    assert not call["paged_kv_cache"][0].any()


def test_what_is_refused_for_another_reason_stays_refused():
    assert not is_convertible(torch.ones(1, dtype=torch.bool), torch.int32)
    assert not is_convertible([1], torch.int32)
    with pytest.raises(ValueError, match="the shape"):
        try:
            raise ValueError("the shape")
        except ValueError:
            converted((_ints(1), 2), {0: torch.int32})
