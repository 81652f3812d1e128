"""Random products of LoRA in mixtures, and hostile ones: right, or refused by name."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer._moe import adapters as steps
from flashinfer._moe.maps import RowMap
from flashinfer.fused_moe import adapters
from flashinfer.gemm import _launch
from flashinfer.jit import JitSpec
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.moe import (
    MoeCombineConfig,
    MoeMapConfig,
    gen_moe_combine_module,
    gen_moe_map_module,
)
from flashinfer.testing import CheckOptions, ErrorBound
from tests.fuzzing import (
    FLOATING,
    Family,
    Fault,
    check_fault,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    with_dtype,
)
from tests.moe.adapters import BF16, Case

FUNCTIONS = ("shrink_pairs", "expand_pairs")
HALF = (BF16, torch.float16)
TOKENS = (0, 1, 2, 9, 40)


@dataclass(frozen=True)
class Draw:
    """One call that the documentation allows; the seed decides the rest."""

    function: str
    tokens: int
    rank: int
    dtype: torch.dtype
    index: torch.dtype
    slices: int
    by_pair: bool
    seed: int


def draws() -> st.SearchStrategy[Draw]:
    return st.builds(
        Draw,
        function=st.sampled_from(FUNCTIONS),
        tokens=st.sampled_from(TOKENS),
        rank=st.sampled_from((8, 16, 32, 64, 128, 256)),
        dtype=st.sampled_from(HALF),
        index=st.sampled_from((torch.int32, torch.int64)),
        slices=st.integers(1, 3),
        by_pair=st.booleans(),
        seed=st.integers(0, 2**31),
    )


def build(case: Draw, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    draw = random.Random(case.seed)
    adapters_, experts = draw.choice(((1, 4), (3, 8), (5, 260)))
    pairs = Case.random(
        device,
        tokens=case.tokens,
        top_k=draw.choice((1, 2, 6)),
        adapters=adapters_,
        experts=experts,
        rank=case.rank,
        hidden=draw.choice((64, 136)),
        columns=tuple(draw.choice((8, 72, 128)) for _ in range(case.slices)),
        dtype=case.dtype,
        index=case.index,
        seed=case.seed,
    )
    count, total = len(pairs.tokens), sum(weight.shape[2] for weight in pairs.second)
    call: dict[str, Any] = {**pairs.pairs(), "y": torch.randn(case.slices, count, case.rank)}
    if case.function == "shrink_pairs":
        rows = torch.randn(count, pairs.x.shape[1]).to(device, case.dtype)
        call |= {"x": rows if case.by_pair else pairs.x, "weights": pairs.first}
        call |= {"per_pair_input": case.by_pair}
    else:
        call["x"] = call["y"].to(device, draw.choice(FLOATING))
        call["y"] = torch.randn(count if case.by_pair else case.tokens, total + draw.choice((0, 3)))
        call |= {"weights": pairs.second, "topk_weights": pairs.weights}
        call |= {"slice_start_loc": pairs.starts().to(case.index), "finalize": not case.by_pair}
    return {**call, "y": call["y"].to(device)}


def options(case: Draw, arguments: dict[str, Any]) -> CheckOptions:
    """A product that is rounded the other way moves a result by a part of the largest term."""
    bound = ErrorBound(rounding=0.02, accumulation=0.02, smallest=1e-4)
    return CheckOptions(bound=bound, check_bias=False)


def _first_weight(change: Any) -> Fault:
    def fault(arguments: dict[str, Any]) -> dict[str, Any]:
        first, *rest = arguments["weights"]
        return {**arguments, "weights": [change(first), *rest]}

    return fault


FAULTS: dict[str, Fault] = {
    "x longer": replace("x", longer),
    "x double": replace("x", with_dtype(torch.float64)),
    "x flat": replace("x", lambda t: t.flatten()),
    "x missing": put("x", None),
    "y with one row more": replace("y", one_row_more),
    "y of 16 bits": replace("y", lambda t: t.half()),
    "y missing": put("y", None),
    "weights double": _first_weight(lambda t: t.double()),
    "weights flat": _first_weight(lambda t: t.flatten(1)),
    "weights strided": _first_weight(lambda t: t.repeat_interleave(2, -1)[..., ::2]),
    "weights of no expert": _first_weight(lambda t: t[:, :0].contiguous()),
    "weights of other k": _first_weight(longer),
    "weights too few": lambda call: {**call, "weights": []},
    "weights missing": put("weights", None),
    "sorted_token_ids of floats": replace("sorted_token_ids", lambda t: t.float()),
    "expert_ids longer": replace("expert_ids", longer),
    "expert_ids of 16 bits": replace("expert_ids", lambda t: t.short()),
    "lora_indices with two dimensions": replace("lora_indices", lambda t: t[None]),
    "lora_indices of floats": replace("lora_indices", lambda t: t.double()),
}
FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    "shrink_pairs": {"per_pair_input a number": put("per_pair_input", 1)},
    "expand_pairs": {
        "finalize a number": put("finalize", 0),
        "topk_weights longer": replace("topk_weights", longer),
        "topk_weights double": replace("topk_weights", lambda t: t.double()),
        "slice_start_loc longer": replace("slice_start_loc", longer),
        "slice_start_loc of floats": replace("slice_start_loc", lambda t: t.float()),
    },
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    return build(Draw(function, 9, 16, BF16, torch.int64, 2, False, seed=3), device)


def _specs() -> list[JitSpec]:
    """The modules of random calls."""
    found = {}

    def recording(config: Any) -> Any:
        spec = gen_gemm_sm90_module(config)
        found[spec.name] = spec
        return lambda *arguments: None

    def empty_map(chosen: torch.Tensor, first: int, count: int) -> RowMap:
        return RowMap.empty(chosen, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_kernels", {})
        patch.setattr(_launch, "get_gemm_kernel", recording)
        patch.setattr(steps, "map_rows", empty_map)
        patch.setattr(steps, "combine", lambda *arguments: None)
        draw = random.Random(7)
        for seed in range(60):
            function, rank = draw.choice(FUNCTIONS), draw.choice((8, 16, 32, 64, 128, 256))
            case = Draw(
                function, draw.choice(TOKENS[1:]), rank, HALF[seed % 2], torch.int64, 2, False, seed
            )
            getattr(adapters, function)(**build(case, torch.device("cuda")))
    around = [gen_moe_combine_module(MoeCombineConfig(dtype, torch.float32)) for dtype in HALF]
    return [*around, gen_moe_map_module(MoeMapConfig("int32")), *found.values()]


FAMILY = Family(
    "adapters of mixtures",
    adapters,
    FUNCTIONS,
    draws(),
    build,
    usual,
    FAULTS,
    function_faults=FUNCTION_FAULTS,
    options=options,
    specs=_specs,
)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def test_products_of_pairs_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
