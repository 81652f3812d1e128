"""Bad calls of sampling and top-k meet the real bindings on the CPU; see test_refusals.py.

Each fault must be refused by the name of its argument, and the call without it must get as far as
the complaint that the tensor is not on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer import sampling, topk
from flashinfer.jit.topk import TopKConfig, TopKOutput, gen_topk_module
from flashinfer.sampling import _inputs

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("bindings_on_the_cpu")]


def _probs() -> torch.Tensor:
    return torch.full((4, 100), 0.01)


def _numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


DRAW = {"seed": 1, "offset": 2}
CALLS: dict[str, dict[str, Any]] = {
    "softmax": {"logits": _probs(), "temperature": 0.5},
    "sampling_from_probs": {"probs": _probs(), **DRAW},
    "top_p_sampling_from_probs": {"probs": _probs(), "top_p": 0.5, **DRAW},
    "top_k_top_p_sampling_from_probs": {"probs": _probs(), "top_k": 3, "top_p": 0.5, **DRAW},
    "min_p_sampling_from_probs": {"probs": _probs(), "min_p": 0.5, **DRAW},
    "top_k_mask_logits": {"logits": _probs(), "top_k": 3},
    "top_k": {"input": _probs(), "k": 3},
    "top_k_page_table_transform": {
        "input": _probs(),
        "src_page_table": torch.zeros(4, 100, dtype=torch.int32),
        "lengths": _numbers(4, torch.int32),
        "k": 3,
    },
    "top_k_ragged_transform": {
        "input": _probs(),
        "offsets": _numbers(4, torch.int32),
        "lengths": _numbers(4, torch.int32),
        "k": 3,
    },
    "chain_speculative_sampling": {
        "draft_probs": torch.full((2, 3, 100), 0.01),
        "draft_token_ids": torch.zeros(2, 3, dtype=torch.int32),
        "target_probs": torch.full((2, 4, 100), 0.01),
        **DRAW,
    },
}

ROWS = [
    _probs().double(),
    _probs()[0],
    _probs()[0, 0],
    torch.full((4, 200), 0.01)[:, ::2],
    torch.empty(4, 0),
    [0.5, 0.5],
    None,
]
FLOATS = [_numbers(3, torch.float32), torch.ones(4, 1), torch.ones(8)[::2], "0.5", float("nan")]
INTS = [_numbers(3, torch.int32), torch.ones(8, dtype=torch.int32)[::2], 2.5, "3", None]
SEEDS = [_numbers(3, torch.int64), _numbers(4, torch.int32), _numbers(4, torch.float32), 1.5, 2**64]
INT_ROWS = [_numbers(4, torch.int64), _numbers(3, torch.int32), [1, 1, 1, 1]]

FAULTS: dict[str, list[Any]] = {
    "logits": ROWS,
    "probs": ROWS,
    "input": ROWS[:4] + ROWS[5:],
    "temperature": [*FLOATS, -1.0],
    "top_p": FLOATS,
    "min_p": FLOATS,
    "top_k": INTS,
    "k": [0, -1, 101, 2.5, "3", None],
    "seed": SEEDS,
    "offset": SEEDS,
    "src_page_table": [torch.zeros(4, 100), torch.zeros(3, 100, dtype=torch.int32), None],
    "lengths": [*INT_ROWS, None],
    "offsets": [*INT_ROWS, None],
    "draft_probs": [torch.ones(2, 3, 100).int(), torch.ones(2, 3), None],
    "draft_token_ids": [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3), None],
    "target_probs": [torch.full((2, 3, 100), 0.01), torch.ones(2, 4, 100).int(), None],
}
OPTIONAL: dict[str, dict[str, list[Any]]] = {
    "softmax": {"enable_pdl": ["yes", 1]},
    "sampling_from_probs": {
        "indices": [_numbers(4, torch.float32), torch.ones(4, 1).int(), torch.tensor(1), [1, 2]],
        "deterministic": ["yes", 1],
        "check_nan": ["no", 2],
        "return_valid": ["no", 2],
    },
    "top_k_top_p_sampling_from_probs": {"filter_apply_order": ["both", None, 1]},
    "top_k": {"tie_break": [3, "small", None], "sorted": ["yes", 2]},
    "top_k_page_table_transform": {
        "row_to_batch": INT_ROWS,
        "row_starts": INT_ROWS,
        "page_table_row_starts": INT_ROWS,
        "page_size": [0, -1, 1.5],
        "out": [torch.zeros(4, 3), torch.zeros(3, 3).int(), torch.zeros(4, 6).int()[:, ::2]],
        "out_raw_indices": [torch.zeros(4, 3), torch.zeros(3, 3).int()],
    },
    "chain_speculative_sampling": {
        "maybe_output_accepted_token_num": [_numbers(3, torch.int32), _numbers(2, torch.float32)]
    },
}
BAD_CALLS = [
    (function, name, value)
    for function, arguments in CALLS.items()
    for name, values in {
        **{name: FAULTS[name] for name in arguments},
        **OPTIONAL.get(function, {}),
    }.items()
    for value in values
    if not (function != "top_k" and name == "k" and value == 101)
]


@pytest.mark.parametrize("function", CALLS)
def test_the_call_without_fault_is_refused_for_the_device_only(function: str):
    with pytest.raises(ValueError, match="must be a CUDA tensor"):
        getattr(flashinfer, function)(**CALLS[function])


@pytest.mark.parametrize(
    ("function", "name", "value"),
    BAD_CALLS,
    ids=[f"{f}-{n}-{i}" for i, (f, n, _) in enumerate(BAD_CALLS)],
)
def test_a_fault_is_refused_by_name(function: str, name: str, value: Any):
    with pytest.raises((TypeError, ValueError), match=f"`{name}`") as error:
        getattr(flashinfer, function)(**{**CALLS[function], name: value})
    assert "must be a CUDA tensor" not in str(error.value)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_numbers_of_rows_have_one_dimension(name: str):
    function = getattr(flashinfer, f"{name}_sampling_from_probs")
    dtype = torch.int32 if name == "top_k" else torch.float32
    with pytest.raises(ValueError, match="Expected a 1D tensor or scalar.*got a 2D tensor"):
        function(_probs(), torch.ones(4, 1, dtype=dtype))


def test_a_seed_takes_the_place_of_a_generator():
    with pytest.raises(ValueError, match="offset"):
        flashinfer.sampling_from_probs(_probs(), offset=1)
    with pytest.raises(ValueError, match="must be a CUDA tensor"):
        flashinfer.sampling_from_probs(_probs(), seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match="`generator` must be a torch.Generator or None, got 3"):
        flashinfer.sampling_from_probs(_probs(), seed=1, generator=3)


def test_unsigned_seeds_pass():
    for seed in (2**64 - 1, torch.ones(4, dtype=torch.uint64), -1):
        with pytest.raises(ValueError, match="must be a CUDA tensor"):
            flashinfer.sampling_from_probs(_probs(), seed=seed)


def test_a_huge_k_is_refused_before_memory_is_taken():
    with pytest.raises(ValueError, match="`k` must be .* got 1000000000000000"):
        flashinfer.top_k(_probs(), 10**15)


def test_the_largest_element_alone_takes_no_workspace():
    input, output = torch.ones(4, 20_000), torch.empty(4, 1)
    for of, needed in ((TopKOutput.RAGGED, True), (TopKOutput.VALUES, False)):
        module = gen_topk_module(TopKConfig(torch.float32, of)).build_and_load()
        assert bool(module.workspace_bytes(4, 20_000, 1)) == needed
        assert module.workspace_bytes(4, 20_000, 2) > 0
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="`workspace` must be None"):
        module.top_k(output.long(), output, workspace, input, 1, False, 0, None)


def test_integers_of_numpy_are_integers():
    for function in ("top_k", "top_k_page_table_transform", "top_k_ragged_transform"):
        with pytest.raises(ValueError, match="must be a CUDA tensor"):
            getattr(flashinfer, function)(**{**CALLS[function], "k": np.int64(3)})


def test_top_k_of_every_integer_dtype():
    for bits in (8, 16, 32, 64):
        for kind in ("int", "uint"):
            values = torch.tensor([0, 3, 100]).to(getattr(torch, f"{kind}{bits}"))
            assert _inputs.row_ints("top_k", values).tolist() == [0, 3, 100]
    assert _inputs.row_ints("top_k", torch.tensor([2**40, -(2**40)])).tolist() == [
        2**31 - 1,
        -(2**31),
    ]
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match="`top_k`"):
            _inputs.row_ints("top_k", torch.ones(3, dtype=dtype))


def test_modules_of_engines_exist():
    assert topk.topk is topk.top_k
    assert sampling.top_k_renorm_prob is sampling.top_k_renorm_probs
