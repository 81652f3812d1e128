"""`cutlass_fused_moe` on a GPU: right or refused, for everything that its documentation allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import reference_backend
from flashinfer.fused_moe import (
    ActivationType,
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    fused_topk_deepseek,
    hash_topk,
)
from flashinfer.trace.templates.moe_four_bit import FOUR_BIT
from flashinfer.trace.templates.moe_routing import fused_topk_deepseek_trace, hash_topk_trace
from tests.moe.calls import ACTIVATIONS, BF16, assert_right, expected, random_call

SCHEMES = ("none", "block", "tensor", *FOUR_BIT)
CASES = [(scheme, activation) for scheme in SCHEMES[:3] for activation in ACTIVATIONS]
# Other formats, but the same activations, in the products of 4-bit weights.
CASES += [
    ("int4", ActivationType.Geglu),
    ("int4", ActivationType.Relu2),
    ("mxfp4", ActivationType.Swiglu),
    ("mxfp4", ActivationType.SwigluBias),
    ("nvfp4", ActivationType.Swiglu),
    ("nvfp4", ActivationType.Identity),
]
TOKENS = (0, 1, 7, 300)
ROUNDS = 1


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("scheme", "activation"), CASES, ids=lambda part: getattr(part, "name", part)
)
def test_random_calls(
    gpu: torch.device, scheme: str, activation: ActivationType, full: bool
) -> None:
    draw = random.Random(f"{scheme} {activation.name}")
    torch.manual_seed(draw.randrange(2**31))
    for _ in range(ROUNDS * (8 if full else 1)):
        for tokens in TOKENS:
            assert_right(random_call(draw, scheme, activation, tokens, gpu))


@pytest.mark.parametrize("sizes", [(1024, 1024), (1024, 384), (384, 1024)], ids=str)
@pytest.mark.parametrize("scheme", FOUR_BIT)
def test_products_that_stream_and_others(
    gpu: torch.device, scheme: str, sizes: tuple[int, int]
) -> None:
    """Both products stream 4-bit weights, or one does, and begins while the other one ends."""
    draw = random.Random(f"{scheme} {sizes}")
    torch.manual_seed(draw.randrange(2**31))
    for tokens in (1, 40, 300):
        call = random_call(draw, scheme, ActivationType.SwigluBias, tokens, gpu, sizes)
        assert_right(call, enable_pdl=True)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_sum_to_the_whole(gpu: torch.device, scheme: str) -> None:
    draw = random.Random(3)
    whole = random_call(draw, scheme, ActivationType.Swiglu, 50, gpu)
    whole = {**whole, "ep_size": 1, "ep_rank": 0, "tp_rank": 0}
    whole = {name: value for name, value in whole.items() if not name.startswith("swiglu")}
    experts = whole["fc1_expert_weights"].shape[0]
    whole["token_selected_experts"] = torch.randint(0, experts, (50, 4), device=gpu)
    whole["token_final_scales"] = torch.rand(50, 4, device=gpu)
    total = torch.zeros(whole["input"].shape, dtype=torch.float64, device=gpu)
    for rank in range(2):
        part = slice(rank * experts // 2, (rank + 1) * experts // 2)
        mine = {**whole, "ep_size": 2, "ep_rank": rank}
        for name in ("fc1_expert_weights", "fc2_expert_weights", "fc1_expert_biases"):
            if mine.get(name) is not None:
                mine[name] = mine[name][part]
        if mine.get("fc2_expert_biases") is not None:
            mine["fc2_expert_biases"] = mine["fc2_expert_biases"][part]
        if scheme != "none":
            mine["quant_scales"] = [
                scale[part] if scale.shape[:1] == (experts,) else scale
                for scale in whole["quant_scales"]
            ]
        total += cutlass_fused_moe(**mine)[0].double()
    target = expected(whole)
    assert float((total - target).norm()) < 0.05 * float(target.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_workspace_is_enough_and_holds_nothing(gpu: torch.device, scheme: str) -> None:
    call = random_call(random.Random(1), scheme, ActivationType.Swiglu, 40, gpu)
    experts, hidden, intermediate = call["fc2_expert_weights"].shape
    intermediate *= 2 if scheme in FOUR_BIT else 1
    size = cutlass_fused_moe_workspace_size(
        64,
        hidden,
        intermediate * 2,
        experts * call["ep_size"],
        call["token_selected_experts"].shape[1],
        x_dtype=call["input"].dtype,
        weight_dtype=call["fc1_expert_weights"].dtype,
        tp_size=2,
        ep_size=call["ep_size"],
        use_deepseek_fp8_block_scale=scheme == "block",
        use_w4_group_scaling=scheme in FOUR_BIT,
    )
    usual = assert_right(call)
    for offset in (0, 3):
        memory = torch.full((size + offset,), 255, dtype=torch.uint8, device=gpu)
        assert torch.equal(assert_right(call, workspace_buffer=memory[offset:]), usual)
    with pytest.raises(ValueError, match="workspace_buffer"):
        cutlass_fused_moe(**call, workspace_buffer=memory[: size // 4])


def test_four_scales_of_mxfp4_in_an_int32(gpu: torch.device) -> None:
    call = random_call(random.Random(5), "mxfp4", ActivationType.Swiglu, 9, gpu, (512, 256))
    words = [scale.view(torch.int32) for scale in call["quant_scales"]]
    assert torch.equal(assert_right({**call, "quant_scales": words}), assert_right(call))


def test_other_tokens_change_nothing_with_one_tile(gpu: torch.device) -> None:
    """Two batches that have the same tiles give a token the same bits."""
    call = random_call(random.Random(2), "none", ActivationType.Swiglu, 7, gpu)
    usual = cutlass_fused_moe(**call)[0]
    call["input"] = call["input"].clone()
    call["input"][1:] += 1
    assert torch.equal(cutlass_fused_moe(**call)[0][0], usual[0])


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "input": lambda call: call["input"].double(),
    "token_selected_experts": lambda call: call["token_selected_experts"][:-1],
    "token_final_scales": lambda call: call["token_final_scales"].half(),
    "fc1_expert_weights": lambda call: call["fc1_expert_weights"][:, :-8],
    "fc2_expert_weights": lambda call: call["fc2_expert_weights"].double(),
    "output_dtype": lambda call: torch.float32,
    "quant_scales": lambda call: [torch.ones(1, device="cuda")] * 3,
    "fc1_expert_biases": lambda call: call["fc1_expert_weights"][:, :-1, 0],
    "swiglu_alpha": lambda call: torch.ones(3, device="cuda"),
    "tp_rank": lambda call: 2,
    "ep_size": lambda call: 0,
    "cluster_size": lambda call: 2,
    "output": lambda call: call["input"][:-1],
    "use_w4_group_scaling": lambda call: True,
    "use_mxfp8_act_scaling": lambda call: True,
    "min_latency_mode": lambda call: True,
    "use_packed_weights": lambda call: True,
    "use_wfp4afp8_humming": lambda call: True,
    "input_sf": lambda call: call["input"],
    "profile_ids": lambda call: [1, 2],
    "activation_type": lambda call: ActivationType.Silu,
    "workspace_buffer": lambda call: torch.empty(4, 4, device="cuda"),
    "situ_beta": lambda call: torch.ones(8, device="cuda"),
    "backend": lambda call: "cake",
    "enable_pdl": lambda call: 1,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(gpu: torch.device, name: str) -> None:
    call = random_call(random.Random(4), "none", ActivationType.Swiglu, 5, gpu)
    call.update(tp_rank=0, ep_size=1, ep_rank=0)
    call[name] = FAULTS[name](call)
    with pytest.raises((TypeError, ValueError), match=name):
        cutlass_fused_moe(**call)


@pytest.mark.parametrize("experts", [8, 64, 256, 384])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_routing(gpu: torch.device, experts: int, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 67):
        call: dict[str, Any] = {
            "scores": torch.randn(tokens, experts, device=gpu).to(dtype),
            "bias": torch.randn(experts, device=gpu) * 0.1,
            "n_group": 8 if experts > 8 else 1,
            "topk_group": 4 if experts > 8 else 1,
            "topk": 6,
            "routed_scaling_factor": 2.5,
        }
        values = torch.full((tokens, 6), float("nan"), device=gpu)
        indices = torch.full((tokens, 6), -7, device=gpu, dtype=torch.int32)
        replay = torch.full((tokens + 3, 6), -7, device=gpu, dtype=torch.int16)
        given = {"topk_values": values, "topk_indices": indices, "routing_replay_out": replay}
        fused_topk_deepseek(**call, **given)
        target = fused_topk_deepseek_trace(**call).compute(call)
        assert torch.equal(indices, target[1]) and torch.allclose(values.double(), target[0])
        assert torch.equal(replay[:tokens].int(), indices) and bool((replay[tokens:] == -7).all())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_routing_by_a_table(gpu: torch.device, index: torch.dtype) -> None:
    table = torch.randint(0, 64, (500, 6), device=gpu).to(index)
    for tokens in (0, 1, 130):
        ids = torch.randint(-2, 502, (tokens,), device=gpu).to(index)
        call = (torch.randn(tokens, 64, device=gpu) * 9, ids, table)
        weights, experts = hash_topk(*call, routed_scaling_factor=1.5)
        names = ("router_logits", "input_ids", "tid2eid")
        arguments = dict(zip(names, call, strict=True), routed_scaling_factor=1.5)
        target = hash_topk_trace().compute(arguments)
        assert torch.equal(experts, target[1]) and torch.allclose(weights.double(), target[0])
        sums = weights.sum(-1)  # of 1, whatever the layer multiplies by; 0 where there is no expert
        assert torch.allclose(sums, (experts >= 0).any(-1).to(sums))
        both, numbers = hash_topk(*call, num_fused_shared_experts=1, routed_scaling_factor=1.5)
        assert torch.equal(both[:, :-1], weights) and torch.equal(numbers[:, :-1], experts)
        assert bool((both[:, -1] == 1 / 1.5).all()) and bool((numbers[:, -1] == 64).all())


def test_a_shared_expert_has_a_place_and_a_factor() -> None:
    logits, ids = torch.randn(3, 64), torch.zeros(3, dtype=torch.int64)
    table = torch.zeros(9, 32, dtype=torch.int32)
    refusals: list[tuple[dict[str, float], str]] = [
        ({"num_fused_shared_experts": 2}, "num_fused_shared_experts"),
        ({"num_fused_shared_experts": 1}, "top_k|tid2eid"),
        ({"num_fused_shared_experts": 1, "routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ]
    for options, name in refusals:
        few = table if name.startswith("top_k") else table[:, :4].contiguous()
        with reference_backend(), pytest.raises(ValueError, match=name):
            hash_topk(logits, ids, few, **options)  # type: ignore[arg-type]
