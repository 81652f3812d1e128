"""Kimi Delta Attention under random lengths, heads, strides, dtypes, gates, slots and drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import kda_decode
from flashinfer._linear_attention.by_channel import TOKENS_FOR_CHUNKS
from flashinfer.jit import JitSpec
from flashinfer.jit.delta_rule import (
    CHUNK_HEAD_DIMS,
    ChunkKdaConfig,
    DeltaRuleConfig,
    gen_chunk_kda_module,
    gen_delta_rule_module,
)
from flashinfer.testing import CheckOptions, ErrorBound, error_bound, unit_roundoff
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    longer,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.linear_attention.drawing import FULL_EXAMPLES, Source, bounds_of

FUNCTIONS = ("recurrent_kda", "packed_kda_decode")
# Types of tensors and states, and the head size of keys.
MODULES = (
    (torch.bfloat16, torch.float32, 128),
    (torch.bfloat16, torch.bfloat16, 64),
    (torch.float16, torch.float16, 32),
)
GATES = ("logarithm", "softplus", "bounded")
POOLS = ("none", "rows", "slots", "drafts", "source")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    module: tuple[torch.dtype, torch.dtype, int]
    lengths: tuple[int, ...]
    packed: bool  # sequences lie one after the other; else they are rows of a batch
    heads: int
    group: int
    head_dim_v: int
    gate: str
    logits: bool
    normalize: bool
    scale: float | None
    pool: str  # where states are read and written
    padding: bool
    accepted: bool  # drafts: how many tokens of the last call count
    final: bool
    frozen: bool
    every: int  # tokens between checkpoints, 0: none
    slots_of_checkpoints: bool
    with_output: bool
    index: torch.dtype
    gap: int  # heads between the tokens' rows that belong to no tensor
    seed: int

    @property
    def is_prompt(self) -> bool:
        """Whether chunks may serve it."""
        lengths = _lengths(self)
        enough = len(lengths) > 0 and sum(lengths) >= TOKENS_FOR_CHUNKS * len(lengths)
        return enough and self.function == "recurrent_kda" and self.module[2] in CHUNK_HEAD_DIMS

    @property
    def state_dtype(self) -> torch.dtype:
        """Without an initial state, final ones are float32."""
        return torch.float32 if self.pool == "none" and self.final else self.module[1]


CASES = st.builds(
    Case,
    function=st.sampled_from(FUNCTIONS),
    module=st.sampled_from(MODULES),
    lengths=st.one_of(
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 30]), max_size=4).map(tuple),
        st.lists(st.sampled_from([63, 128, 150, 257]), max_size=2).map(tuple),
    ),
    packed=st.booleans(),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim_v=st.sampled_from([8, 24, 40, 64, 128]),
    gate=st.sampled_from(GATES),
    logits=st.booleans(),
    normalize=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1]),
    pool=st.sampled_from(POOLS),
    padding=st.booleans(),
    accepted=st.booleans(),
    final=st.booleans(),
    frozen=st.booleans(),
    every=st.sampled_from([0, 0, 1, 3, 8, 64]),
    slots_of_checkpoints=st.booleans(),
    with_output=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


def _lengths(case: Case) -> tuple[int, ...]:
    """Rows of a batch are equally long; a draft has as many tokens as slots, and at least two."""
    if case.pool == "drafts":
        return (2 + case.seed % 4,) * len(case.lengths)
    return case.lengths if case.packed else case.lengths[:1] * len(case.lengths)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    source = Source(case.seed, device)
    if case.function == "packed_kda_decode":
        return _build_packed(case, source)
    dtype, _, dim = case.module
    lengths, v_heads = _lengths(case), case.heads * case.group
    shape = (len(lengths), lengths[0] if lengths else 3)
    if case.packed:
        shape = (1, sum(lengths))
    width = 1.0 if case.normalize else dim**-0.5
    gate = source.heads(*shape, v_heads, dim, gap=case.gap, dtype=dtype)
    beta = source.normal(*shape, v_heads, dtype=dtype)
    arguments: dict[str, Any] = {
        "q": source.heads(*shape, case.heads, dim, gap=case.gap, dtype=dtype),
        "k": source.heads(*shape, case.heads, dim, gap=case.gap, dtype=dtype) * width,
        "v": source.heads(*shape, v_heads, case.head_dim_v, gap=case.gap, dtype=dtype),
        "g": -gate.abs() if case.gate == "logarithm" else gate,
        "beta": beta if case.logits else torch.sigmoid(beta),
        "scale": case.scale,
        "use_qk_l2norm_in_kernel": case.normalize,
        "use_gate_in_kernel": case.gate != "logarithm",
        "beta_is_logit": case.logits,
        "output_final_state": case.final,
        "disable_state_update": case.frozen and case.pool != "none",
        "backend": "auto",
    }
    if case.packed:
        arguments["cu_seqlens"] = bounds_of(lengths, case.index, device)
    if case.gate != "logarithm":
        arguments["A_log"] = source.normal(v_heads)
        arguments["dt_bias"] = source.normal(v_heads, dim)
        arguments["lower_bound"] = -5.0 if case.gate == "bounded" else None
    if case.with_output:
        arguments["output"] = torch.empty_like(arguments["v"].contiguous())
    _add_pools(arguments, case, source, len(lengths))
    _add_checkpoints(arguments, case, source, lengths)
    return arguments


def _build_packed(case: Case, source: Source) -> dict[str, Any]:
    dtype, state_dtype, dim = case.module
    batch, heads = len(case.lengths), case.heads
    return {
        "mixed_qkv": source.normal(batch, 3 * heads * dim, dtype=dtype),
        "raw_gate": source.normal(batch, heads * dim, dtype=dtype),
        "raw_beta": source.normal(batch, heads, dtype=dtype),
        "A_log": source.normal(heads),
        "dt_bias": source.normal(heads * dim),
        "state": source.pool(batch + 2, heads, dim, dim, gap=case.gap, dtype=state_dtype),
        "state_indices": source.slots(batch, batch + 2, case.index, case.padding),
        "output": source.normal(batch, 1, heads, dim, dtype=dtype) if case.with_output else None,
    }


def _add_pools(arguments: dict[str, Any], case: Case, source: Source, count: int) -> None:
    """Where states are: a row of each sequence, slots of a pool, slots of tokens, or two pools."""
    if case.pool == "none":
        return
    heads, dim = case.heads * case.group, case.module[2]
    steps = 2 + case.seed % 4 if case.pool == "drafts" else 1
    size = count * steps + (0 if case.pool == "rows" else 3)

    def pool() -> torch.Tensor:
        shape = (size, heads, case.head_dim_v, dim)
        return source.pool(*shape, gap=case.gap, dtype=case.state_dtype)

    arguments["initial_state"] = pool()
    if case.pool == "source":
        arguments["initial_state_source"] = pool()
        arguments["initial_state_indices"] = source.slots(count, size, case.index, case.padding)
    if case.pool in ("slots", "drafts"):
        slots = source.slots(count * steps, size, case.index, case.padding)
        arguments["ssm_state_indices"] = slots.view(count, steps) if steps > 1 else slots
    if case.pool == "drafts":
        arguments["num_spec_tokens"] = steps - 1
        if case.accepted:
            counts = source.uniform(1, steps + 1, count).clamp(max=steps)
            arguments["num_accepted_tokens"] = counts.int()


def _add_checkpoints(
    arguments: dict[str, Any], case: Case, source: Source, lengths: tuple[int, ...]
) -> None:
    if not case.every:
        return
    counts = [length // case.every for length in lengths]
    total, heads = sum(counts), case.heads * case.group
    spare = 2 if case.slots_of_checkpoints else 0
    shape = (total + spare, heads, case.head_dim_v, case.module[2])
    arguments |= {
        "state_checkpoints": source.pool(*shape, gap=0, dtype=case.state_dtype),
        "checkpoint_cu_starts": bounds_of(counts, torch.int64, source.device),
        "checkpoint_every_n_tokens": case.every,
    }
    if case.slots_of_checkpoints:
        slots = source.slots(total, total + spare, case.index, case.padding)
        arguments["checkpoint_state_indices"] = slots


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Token by token everything is float32 until results are rounded; an output sums.

    Chunks round what they multiply to the tensors' type: a unit of what a result's row is made of.
    """
    dtype, _, dim = case.module
    coarse = max(dtype, case.state_dtype, key=lambda kind: torch.finfo(kind).eps)
    if case.is_prompt:
        unit = unit_roundoff(coarse)
        bound = ErrorBound(2 * unit, 8 * unit, float(torch.finfo(coarse).tiny), None)
        return CheckOptions(bound=bound, check_bias=False)
    factor = dim**-0.5 if case.scale is None else case.scale
    magnitude = 8.0 * max(1.0, factor * (1.0 if case.normalize else dim**0.5))
    return CheckOptions(bound=error_bound(coarse, dim, magnitude=magnitude))


FAULTS: dict[str, Fault] = {
    # of recurrent_kda
    "q of another dtype": replace("q", with_dtype(torch.float64)),
    "q three-dimensional": replace("q", lambda t: t[0] if len(t) else None),
    "k longer": replace("k", longer),
    "k strided": replace("k", strided),
    "v of another dtype": replace("v", with_dtype(torch.float64)),
    "v missing": put("v", None),
    "g longer": replace("g", longer),
    "g of integers": replace("g", with_dtype(torch.int32)),
    "beta longer": replace("beta", longer),
    "initial_state of integers": replace("initial_state", with_dtype(torch.int32)),
    "initial_state longer": replace("initial_state", longer),
    "dt_bias longer": replace("dt_bias", longer),
    "lower_bound positive": put("lower_bound", 1.0),
    "cu_seqlens of floats": replace("cu_seqlens", with_dtype(torch.float32)),
    "ssm_state_indices of floats": replace("ssm_state_indices", with_dtype(torch.float32)),
    "scale not a number": put("scale", float("nan")),
    "scale text": put("scale", "1"),
    "backend unknown": put("backend", "another"),
    # of packed_kda_decode
    "mixed_qkv longer": replace("mixed_qkv", longer),
    "mixed_qkv of another dtype": replace("mixed_qkv", with_dtype(torch.float64)),
    "raw_gate longer": replace("raw_gate", longer),
    "raw_beta longer": replace("raw_beta", longer),
    "state of integers": replace("state", with_dtype(torch.int32)),
    "state_indices of floats": replace("state_indices", with_dtype(torch.float32)),
    # of both
    "A_log of another dtype": replace("A_log", with_dtype(torch.float64)),
    "A_log longer": replace("A_log", longer),
    "output longer": replace("output", longer),
    "output of another dtype": replace("output", with_dtype(torch.float64)),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    case = Case(
        function, MODULES[0], (3, 2), True, 2, 2, 16, "bounded", True, True, None, "slots", False,
        False, True, False, 0, False, True, torch.int32, 1, 0,
    )  # fmt: skip
    return build(case, device)


def specs() -> list[JitSpec]:
    """Calls without a pool have float32 states, those with logarithms a float32 bias."""
    found = []
    for dtype, kind, dim in MODULES:
        for state in {kind, torch.float32}:
            types = (dtype, state, dtype, dtype, torch.float32, dim)
            found.append(gen_delta_rule_module(DeltaRuleConfig(*types, channel_gate=True)))
            if dim in CHUNK_HEAD_DIMS:
                found.append(gen_chunk_kda_module(ChunkKdaConfig(*types)))
    return found


FAMILY = Family(
    "KDA", kda_decode, FUNCTIONS, CASES, build, usual, FAULTS,
    options=options, specs=specs, full_examples=FULL_EXAMPLES,
)  # fmt: skip


def test_kda_is_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
