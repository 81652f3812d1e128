"""Mixtures and their routers under random types, activations, routings and ranks."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import fused_moe
from flashinfer._moe import experts, four_bit
from flashinfer.gemm import _launch
from flashinfer.jit import JitSpec
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.moe import (
    MoeCombineConfig,
    MoeHashConfig,
    MoeMapConfig,
    MoeRouteConfig,
    gen_moe_combine_module,
    gen_moe_hash_module,
    gen_moe_map_module,
    gen_moe_route_module,
)
from flashinfer.jit.quantization import GroupQuantConfig, gen_group_quant_module
from flashinfer.jit.weight_gemm import gen_weight_gemm_module
from flashinfer.testing import CheckOptions, error_bound
from flashinfer.testing.numerics import ErrorBound
from flashinfer.trace.templates.moe_four_bit import FOUR_BIT
from tests.fuzzing import (
    FLOATING,
    MODULES_PER_COMPILED,
    Family,
    Fault,
    check_fault,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.moe.calls import ACTIVATIONS, BF16, F16, KEEPS_HALF, random_call

SCHEMES = ("none", "block", "tensor", *FOUR_BIT)
KINDS = [(scheme, activation) for scheme in SCHEMES for activation in ACTIVATIONS]
FUNCTIONS = ("cutlass_fused_moe", "fused_topk_deepseek", "hash_topk", "mono_moe")
TOKENS = (0, 1, 2, 9, 70, 200)
EXPERTS_PER_LANE = 8
EXACT, CODED = 0.02, 0.1  # of a row's largest element; a code that is rounded otherwise moves 1/8


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows; the seed decides the rest."""

    function: str
    kind: tuple[str, Any]
    tokens: int
    dtype: torch.dtype
    wide: tuple[bool, bool]  # 64-bit ids and tables
    given: bool  # the result's memory
    seed: int


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        function=st.sampled_from((*FUNCTIONS, "cutlass_fused_moe")),
        kind=st.sampled_from(KINDS),
        tokens=st.sampled_from(TOKENS),
        dtype=st.sampled_from(FLOATING),
        wide=st.tuples(st.booleans(), st.booleans()),
        given=st.booleans(),
        seed=st.integers(0, 2**31),
    )


def _separate(draw: random.Random, tokens: int, columns: int) -> torch.Tensor:
    """Logits of which no two sums are as near as roundings of a score."""
    rows = [torch.randperm(columns) + torch.rand(columns) / 2 for _ in range(tokens)]
    spread = draw.choice((3.0, 8.0)) / columns
    return torch.stack(rows) * spread - 2.3 if rows else torch.empty(0, columns)


def _router(case: Case, draw: random.Random, device: torch.device) -> dict[str, Any]:
    groups, kept = draw.choice(((1, 1), (8, 4), (8, 1), (4, 3)))
    columns = groups * draw.choice((8, 16, 24))
    top_k = min(draw.choice((1, 2, 6, 8)), columns // groups * kept)
    bias = torch.randint(0, 2, (columns,)) * draw.choice((0, 2))
    logits = _separate(draw, case.tokens, columns).to(case.dtype)
    copies = None
    if case.given:  # rows past the tokens are kept
        rows, dtype = case.tokens + draw.choice((0, 3)), draw.choice((torch.int16, torch.int32))
        copies = torch.randint(-9, 9, (rows, top_k)).to(device, dtype)
    return {
        "routing_replay_out": copies,
        "scores": logits.to(device),
        "bias": bias.to(device, draw.choice(FLOATING)),
        "n_group": groups,
        "topk_group": kept,
        "topk": top_k,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "topk_values": torch.empty(case.tokens, top_k, device=device),
        "topk_indices": torch.empty(case.tokens, top_k, device=device, dtype=torch.int32),
    }


def _table(case: Case, draw: random.Random, device: torch.device) -> dict[str, Any]:
    columns, top_k = draw.choice(((64, 6), (8, 1), (200, 32)))
    ids, table = (torch.int64 if wide else torch.int32 for wide in case.wide)
    return {
        "router_logits": (torch.randn(case.tokens, columns) * 9).to(device, case.dtype),
        "input_ids": torch.randint(-2, 42, (case.tokens,)).to(device, ids),
        "tid2eid": torch.randint(-1, columns + 1, (40, top_k)).to(device, table),
        "routed_scaling_factor": draw.choice((1.0, 0.3)),
        "num_fused_shared_experts": int(top_k < 32 and case.given),
    }


def _whole(case: Case, draw: random.Random, device: torch.device) -> dict[str, Any]:
    """A mixture from its logits on."""
    experts, hidden, intermediate = draw.choice(((6, 256, 128), (16, 384, 256), (9, 128, 128)))
    call: dict[str, Any] = {
        "activations_in": torch.randn(case.tokens, hidden).to(device, BF16),
        "router_logits": _separate(draw, case.tokens, experts).to(device, case.dtype),
        "top_k": draw.choice((1, 2, 5)),
        "scoring_func": draw.choice(("softmax", "sigmoid")),
        "renormalize": draw.random() < 0.5,
        "interleave_up": draw.random() < 0.5,
    }
    for name, rows, k in (("up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
        scales = (torch.rand(experts, rows // 128, k // 128) + 0.5) / (16 * k**0.5)
        codes = (torch.randn(experts, rows, k) * 16).to(device, torch.float8_e4m3fn)
        call |= {f"expert_weights_{name}": codes, f"expert_scales_{name}": scales.to(device)}
    if case.given:
        call["out"] = torch.empty_like(call["activations_in"])
        call["scratchpad"] = torch.zeros(2**22, dtype=torch.uint8, device=device)
    return call


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    draw = random.Random(case.seed)
    torch.manual_seed(case.seed)
    if case.function == "fused_topk_deepseek":
        return _router(case, draw, device)
    if case.function == "hash_topk":
        return _table(case, draw, device)
    if case.function == "mono_moe":
        return _whole(case, draw, device)
    call = random_call(draw, *case.kind, case.tokens, device)
    if case.given:
        call["output"] = torch.empty(call["input"].shape, dtype=call["output_dtype"], device=device)
    return call


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    if case.function in ("fused_topk_deepseek", "hash_topk"):
        return CheckOptions(bound=error_bound(torch.float32, 32, roundings=16))
    is_exact = case.function == "cutlass_fused_moe" and case.kind[0] in KEEPS_HALF
    part = EXACT if is_exact else CODED
    bound = ErrorBound(rounding=part, accumulation=part, smallest=1e-5)
    return CheckOptions(bound=bound, check_bias=False)


def _shorter(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor[:-1] if tensor.shape[0] else None


def _scales(change: Any) -> Fault:
    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        scales = arguments.get("quant_scales")
        return {**arguments, "quant_scales": change(scales)} if scales else None

    return fault


FAULTS: dict[str, Fault] = {
    "input double": replace("input", with_dtype(torch.float64)),
    "input longer": lambda call: (
        {**call, "input": longer(call["input"]), "output": None} if "input" in call else None
    ),
    "input with three dimensions": replace("input", lambda t: t[None]),
    "input missing": put("input", None),
    "token_selected_experts with one row more": replace("token_selected_experts", one_row_more),
    "token_selected_experts of floats": replace("token_selected_experts", lambda t: t.float()),
    "token_final_scales longer": replace("token_final_scales", longer),
    "token_final_scales of 16 bits": replace("token_final_scales", lambda t: t.half()),
    "fc1_expert_weights narrower": replace("fc1_expert_weights", lambda t: t[:, :-8]),
    "fc1_expert_weights of too few": replace("fc1_expert_weights", _shorter),
    "fc2_expert_weights double": replace("fc2_expert_weights", lambda t: t.double()),
    "fc2_expert_weights flat": replace("fc2_expert_weights", lambda t: t.flatten(1)),
    "output_dtype of 32 bits": put("output_dtype", torch.float32),
    "quant_scales of another shape": _scales(lambda scales: [s.new_ones(3) for s in scales]),
    "fc1_expert_biases longer": replace("fc1_expert_biases", longer),
    "fc2_expert_biases double": replace("fc2_expert_biases", lambda t: t.double()),
    "swiglu_alpha longer": replace("swiglu_alpha", longer),
    "swiglu_limit of 16 bits": replace("swiglu_limit", lambda t: t.half()),
    "ep_size zero": put("ep_size", 0),
    "ep_rank negative": put("ep_rank", -1),
    "activation_type unknown": put("activation_type", 99),
    "activation_type without a kernel": put("activation_type", 2),
    "output with one row more": replace("output", one_row_more, "input"),
    "scores longer": replace("scores", longer),
    "scores double": replace("scores", with_dtype(torch.float64)),
    "scores strided": replace("scores", strided),
    "bias longer": replace("bias", longer),
    "bias missing": put("bias", None),
    "topk zero": put("topk", 0),
    "topk_values of 16 bits": replace("topk_values", lambda t: t.half()),
    "topk_indices wide": replace("topk_indices", lambda t: t.long()),
    "routed_scaling_factor text": put("routed_scaling_factor", "1"),
    "router_logits integer": replace("router_logits", with_dtype(torch.int32)),
    "input_ids longer": replace("input_ids", longer),
    "input_ids of floats": replace("input_ids", lambda t: t.float()),
    "tid2eid flat": replace("tid2eid", lambda t: t.flatten()),
    "activations_in double": replace("activations_in", with_dtype(torch.float64)),
    "expert_weights_up narrower": replace("expert_weights_up", lambda t: t[:, :-128]),
    "expert_weights_up of 16 bits": replace("expert_weights_up", lambda t: t.half()),
    "expert_scales_up longer": replace("expert_scales_up", longer),
    "expert_weights_down flat": replace("expert_weights_down", lambda t: t.flatten(1)),
    "expert_scales_down double": replace("expert_scales_down", lambda t: t.double()),
    "top_k zero": put("top_k", 0),
    "top_k beyond": put("top_k", 99),
    "out with one row more": replace("out", one_row_more),
    "scratchpad of floats": replace("scratchpad", lambda t: t.float()),
}

KERNEL_FAULTS: dict[str, Fault] = {
    "token_selected_experts strided": replace("token_selected_experts", strided),
    "quant_scales too few": _scales(lambda scales: scales[:1]),
    "tp_rank beyond": put("tp_rank", 2),
    "n_group that does not divide": put("n_group", 7),
    "topk_group beyond": put("topk_group", 33),
    "bias strided": replace("bias", strided),
    "input_ids strided": replace("input_ids", strided),
    "tid2eid strided": replace("tid2eid", strided),
    "tid2eid of too many": replace("tid2eid", lambda t: t.new_zeros(t.shape[0], 33)),
}


def _add(name: str, value: Any) -> Fault:
    return lambda arguments: {**arguments, name: value}


FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    "cutlass_fused_moe": {
        f"{name} as Hopper has not": _add(name, value)
        for name, value in {
            "cluster_size": 2,
            "use_mxfp8_act_scaling": True,
            "min_latency_mode": True,
            "use_packed_weights": True,
            "use_wfp4afp8_humming": True,
            "profile_ids": [1, 2],
            "backend": "cake",
            "enable_pdl": 1,
            "tune_max_num_tokens": 0,
            "workspace_buffer": torch.empty(4, 4),
        }.items()
    },
    "fused_topk_deepseek": {
        "routing_replay_out too short": _add(
            "routing_replay_out", torch.empty(1, 6, dtype=torch.int16)
        ),
        "routing_replay_out longer": replace("routing_replay_out", longer),
        "routing_replay_out wide": replace("routing_replay_out", lambda t: t.long()),
        "backend of another GPU": _add("backend", "cake"),
    },
    "mono_moe": {
        "router_logits longer": replace("router_logits", longer),
        "scoring_func unknown": _add("scoring_func", "relu"),
        "renormalize a number": _add("renormalize", 1),
        "interleave_up missing": _add("interleave_up", None),
    },
    "hash_topk": {
        "num_fused_shared_experts two": _add("num_fused_shared_experts", 2),
        "routed_scaling_factor none": _add("routed_scaling_factor", 0.0),
    },
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`, with everything that a fault may change."""
    case = Case(function, ("int4", ACTIVATIONS[0]), 9, torch.float32, (False, False), True, seed=3)
    call = build(case, device)
    if function == "cutlass_fused_moe":
        count, columns = call["fc1_expert_weights"].shape[:2]
        hidden, dtype = call["fc2_expert_weights"].shape[1], call["output_dtype"]
        call["fc1_expert_biases"] = torch.zeros(count, columns, device=device, dtype=dtype)
        call["fc2_expert_biases"] = torch.zeros(count, hidden, device=device, dtype=dtype)
        for name in ("alpha", "limit"):
            call[f"swiglu_{name}"] = torch.ones(count, device=device)
    return call


def _products(kind: tuple[str, Any]) -> list[JitSpec]:
    """The modules of a scheme's and activation's products, for all cases."""
    found: dict[str, JitSpec] = {}

    def recording(generate: Any) -> Any:
        def get(config: Any) -> Any:
            spec = generate(config)
            found[spec.name] = spec
            return lambda *arguments: None

        return get

    def nothing(*arguments: Any, **more: Any) -> Any:
        return more.get("out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_kernels", {})
        patch.setattr(_launch, "get_gemm_kernel", recording(gen_gemm_sm90_module))
        patch.setattr(four_bit, "get_weight_gemm_kernel", recording(gen_weight_gemm_module))
        for name in ("map_rows", "combine", "quantize_rows"):
            patch.setattr(experts, name, nothing)
        for seed in range(60):
            call = build(
                Case(
                    "cutlass_fused_moe", kind, TOKENS[1 + seed % 5], BF16, (False,) * 2, True, seed
                ),
                torch.device("cuda"),
            )
            fused_moe.cutlass_fused_moe(**call)
    return list(found.values())


class MixtureFamily(Family):
    """Compiles whole calls: all products of a third of the schemes and activations."""

    def modules(self, full: bool) -> list[JitSpec]:
        kinds = sorted(KINDS, key=lambda kind: zlib.crc32(repr(kind).encode()))
        kinds = kinds if full else kinds[: len(kinds) // MODULES_PER_COMPILED]
        around = [gen_moe_map_module(MoeMapConfig(index)) for index in ("int32", "int64")]
        for dtype in (BF16, F16):
            around.append(gen_moe_combine_module(MoeCombineConfig(dtype, dtype)))
        around.append(
            gen_group_quant_module(GroupQuantConfig(BF16, "e4m3", "float32", "linear", 128))
        )
        for dtype in FLOATING:
            lanes = (1, 2, 4, EXPERTS_PER_LANE) if full else (2, 4)
            around += [
                gen_moe_route_module(MoeRouteConfig(dtype, "sigmoid", count)) for count in lanes
            ]
        tables = [(ids, table) for ids in ("int32", "int64") for table in ("int32", "int64")]
        around += [
            gen_moe_hash_module(MoeHashConfig(FLOATING[i % 3], *tables[i])) for i in range(4)
        ]
        return around + [spec for kind in kinds for spec in _products(kind)]


FAMILY = MixtureFamily(
    "mixtures of experts",
    fused_moe,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults=FUNCTION_FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=options,
)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def test_mixtures_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
