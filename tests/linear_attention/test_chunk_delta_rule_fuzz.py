"""Prefill of the gated delta rule under random lengths, heads, strides, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gdn_prefill
from flashinfer.jit import JitSpec
from flashinfer.jit.delta_rule import (
    CHUNK_HEAD_DIMS,
    ChunkDeltaRuleConfig,
    DeltaRuleConfig,
    gen_chunk_delta_rule_module,
    gen_delta_rule_module,
)
from flashinfer.testing import CheckOptions, ErrorBound, error_bound, unit_roundoff
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    expanded,
    longer,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.linear_attention.drawing import FULL_EXAMPLES, Source, bounds_of

FUNCTIONS = ("chunk_gated_delta_rule", "chunk_gated_delta_product")
# Types of tensors and states, and the head size of keys; 32 takes the kernel of single tokens.
MODULES = (
    (torch.bfloat16, torch.float32, 128),
    (torch.bfloat16, torch.bfloat16, 64),
    (torch.float16, torch.float16, 128),
    (torch.bfloat16, torch.float32, 32),
)
HEADS = ((1, 1, 1), (1, 1, 2), (2, 2, 4), (4, 2, 2), (2, 1, 2), (1, 1, 3))
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 40, 63, 64, 65, 130]), max_size=3)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    module: tuple[torch.dtype, torch.dtype, int]
    lengths: tuple[int, ...]
    heads: tuple[int, int, int]  # of q, k and v
    head_dim_v: int
    steps: int  # updates of a token, for products
    gates: tuple[bool, bool]  # whether there are decays, and rates
    lowest_decay: float
    normalize: bool
    scale: float | None
    states: tuple[bool, bool]  # whether there are initial states, and final ones
    destinations: tuple[bool, bool]  # whether output and final states have a place
    slots: bool  # initial states are slots of a pool
    checkpoints: int  # tokens between them, 0: none
    index: torch.dtype
    gap: int  # heads between the tokens' rows, and between states, that belong to no tensor
    seed: int


PAIR = st.tuples(st.booleans(), st.booleans())
CASES = st.builds(
    Case,
    function=st.sampled_from(FUNCTIONS),
    module=st.sampled_from(MODULES),
    lengths=LENGTHS.map(tuple),
    heads=st.sampled_from(HEADS),
    head_dim_v=st.sampled_from([64, 64, 128, 192]),
    steps=st.integers(1, 3),
    gates=PAIR,
    lowest_decay=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    normalize=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1]),
    states=PAIR,
    destinations=PAIR,
    slots=st.booleans(),
    checkpoints=st.sampled_from([0, 0, 64, 128]),
    index=st.sampled_from([torch.int32, torch.int64]),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    source = Source(case.seed, device)
    dtype, _, dim = case.module
    q_heads, k_heads, v_heads = case.heads
    heads, total = max(q_heads, v_heads), sum(case.lengths)
    steps = case.steps if case.function == FUNCTIONS[1] else 1

    def rows(count: int, heads: int, width: int) -> torch.Tensor:
        return source.heads(count, heads, width, gap=case.gap, dtype=dtype)

    decay = source.uniform(case.lowest_decay, 1.0, total, heads)
    arguments: dict[str, Any] = {
        "q": rows(total, q_heads, dim),
        "k": rows(steps * total, k_heads, dim) * (1.0 if case.normalize else dim**-0.5),
        "v": rows(steps * total, v_heads, case.head_dim_v),
        "g": decay if case.gates[0] else None,
        "beta": source.uniform(0.0, 1.0, steps * total, heads) if case.gates[1] else None,
        "scale": case.scale,
        "use_qk_l2norm_in_kernel": case.normalize,
        "output_final_state": case.states[1],
        "cu_seqlens": bounds_of(case.lengths, case.index, device),
    }
    if steps > 1 or case.function == FUNCTIONS[1]:
        arguments["num_householder"] = steps
    if case.destinations[0]:
        arguments["output"] = rows(total, heads, case.head_dim_v)
    _add_states(arguments, case, source, heads)
    return arguments


def _add_states(arguments: dict[str, Any], case: Case, source: Source, heads: int) -> None:
    """Initial and final states, as rows or as slots, and checkpoints.

    Slots and checkpoints are for kernels alone: the reference backend does not take them.
    """
    count, state_dtype = len(case.lengths), case.module[1]
    shape = (heads, case.head_dim_v, case.module[2])
    kernels = case.function == FUNCTIONS[0] and source.device.type == "cuda"
    slots = case.slots and case.states[0] and kernels
    if case.states[0]:
        pool = source.pool(count + 2 * slots, *shape, gap=case.gap, dtype=state_dtype)
        arguments["initial_state"] = pool
        if slots:
            arguments["state_indices"] = source.slots(count, count + 2, case.index, False)
    kept_dtype = state_dtype if case.states[0] else torch.float32
    if case.states[1] and case.destinations[1]:
        arguments["output_state"] = source.pool(count, *shape, gap=case.gap, dtype=kept_dtype)
    if case.checkpoints and kernels:
        counts = [length // case.checkpoints for length in case.lengths]
        dtype = kept_dtype if case.states[0] or case.states[1] else state_dtype
        arguments |= {
            "state_checkpoints": source.pool(sum(counts), *shape, gap=0, dtype=dtype),
            "checkpoint_cu_starts": bounds_of(counts, torch.int64, source.device),
            "checkpoint_every_n_tokens": case.checkpoints,
        }


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Chunks round what they multiply to the tensors' type; single tokens are in float32.

    A template has one result for states. Where the call writes more than that, a pool's slots or
    checkpoints, the other arguments are not compared.
    """
    dtype, state_dtype, dim = case.module
    coarse = max(dtype, state_dtype, key=lambda kind: torch.finfo(kind).eps)
    if dim in CHUNK_HEAD_DIMS:
        # A rounding is a unit of what its row is made of; single ones do not add up to a few.
        unit = unit_roundoff(coarse)
        bound = ErrorBound(2 * unit, 8 * unit, float(torch.finfo(coarse).tiny), None)
    else:
        factor = dim**-0.5 if case.scale is None else case.scale
        magnitude = 8.0 * max(1.0, factor * (1.0 if case.normalize else dim**0.5))
        bound = error_bound(coarse, dim, magnitude=magnitude)
    in_place = "state_indices" in arguments and case.states[1] and not case.destinations[1]
    return CheckOptions(
        bound=bound,
        compare_arguments=not in_place and "state_checkpoints" not in arguments,
        check_bias=dim not in CHUNK_HEAD_DIMS,
    )


FAULTS: dict[str, Fault] = {
    "q of another dtype": replace("q", with_dtype(torch.float64)),
    "q four-dimensional": replace("q", lambda t: t[None]),
    "k longer": replace("k", longer),
    "k strided": replace("k", strided),
    "v of another dtype": replace("v", with_dtype(torch.float64)),
    "v missing": put("v", None),
    "g of another dtype": replace("g", with_dtype(torch.float64)),
    "g longer": replace("g", longer),
    "beta longer": replace("beta", longer),
    "initial_state of integers": replace("initial_state", with_dtype(torch.int32)),
    "initial_state longer": replace("initial_state", longer),
    "output longer": replace("output", longer),
    "output of another dtype": replace("output", with_dtype(torch.float64)),
    "output_state longer": replace("output_state", longer),
    "output_state expanded": replace("output_state", expanded),
    "cu_seqlens of floats": replace("cu_seqlens", with_dtype(torch.float32)),
    "cu_seqlens missing": put("cu_seqlens", None),
    "scale not a number": put("scale", float("nan")),
    "scale text": put("scale", "1"),
    "backend unknown": lambda arguments: {**arguments, "backend": "another"},
}
FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    FUNCTIONS[0]: {
        "checkpoint_every_n_tokens alone": lambda arguments: (
            None
            if "state_checkpoints" in arguments
            else {**arguments, "checkpoint_every_n_tokens": 64}
        ),
    },
    FUNCTIONS[1]: {"num_householder none": put("num_householder", 0)},
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    case = Case(
        function, MODULES[0], (3, 5), (1, 1, 2), 64, 2, (True, True), 0.9, True, None,
        (True, True), (True, True), False, 0, torch.int64, 1, 0,
    )  # fmt: skip
    return build(case, device)


def specs() -> list[JitSpec]:
    found = []
    for dtype, state, dim in MODULES:
        for kind in {state, torch.float32}:  # calls without initial states have float32 ones
            if dim in CHUNK_HEAD_DIMS:
                found.append(gen_chunk_delta_rule_module(ChunkDeltaRuleConfig(dtype, kind, dim)))
            else:
                none = torch.float32
                config = DeltaRuleConfig(dtype, kind, none, none, none, dim)
                found.append(gen_delta_rule_module(config))
    return found


FAMILY = Family(
    "gated delta rule in chunks", gdn_prefill, FUNCTIONS, CASES, build, usual, FAULTS,
    FUNCTION_FAULTS, options=options, specs=specs, full_examples=FULL_EXAMPLES,
)  # fmt: skip


def test_prefill_is_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
