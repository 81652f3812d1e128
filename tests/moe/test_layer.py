"""The layer of experts: against loops in float64, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.fused_moe import (
    ExpertConfig,
    MoEActivationPack,
    MoEConfig,
    MoELayer,
    MoEWeightPack,
    QuantConfig,
    QuantFormat,
    RoutingConfig,
    RoutingInputMode,
    RoutingMethodType,
    SwiGLU,
    prepare,
)

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 256, 128, 9, 2
SIZES = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
FORMATS = {
    "cutlass_bf16": (QuantConfig(), 0.01),
    "cutlass_fp8_block": (QuantConfig(QuantFormat.DeepSeekFp8, QuantFormat.BF16), 0.08),
    "cutlass_fp8_per_tensor": (QuantConfig(*[QuantFormat.FP8PerTensor] * 2), 0.08),
    "cutlass_w4a16": (QuantConfig(QuantFormat.MXFP4, QuantFormat.BF16), 0.2),
}

REFUSED = ("TopK", "Unspecified")
BIASED = ("DeepSeekV3", "MiniMax2")
RENORMALISED = ("Renormalize", "RenormalizeNaive", "DeepSeekV3", "SigmoidRenorm", "MiniMax2")


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


@dataclasses.dataclass
class Case:
    """Random experts and tokens."""

    w1: torch.Tensor
    w2: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(cls, device: torch.device) -> Case:
        torch.manual_seed(3)
        w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
        w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
        ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
        tensors = w1.to(BF16), w2.to(BF16), torch.randn(TOKENS, HIDDEN).to(BF16), ids
        weights = torch.rand(TOKENS, TOP_K).to(BF16).float()
        return cls(*(tensor.to(device) for tensor in (*tensors, weights)))

    def pack(self, **changes: Any) -> MoEActivationPack:
        return MoEActivationPack(
            **{
                "hidden_states_q": self.x,
                "hidden_states_scale": None,
                "topk_ids": self.ids,
                "topk_weights": self.weights,
                **changes,
            }
        )

    def expected(self, gate: tuple[float, float, float] = (1.0, 0.0, float("inf"))) -> torch.Tensor:
        """The sum over each token's experts."""
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        alpha, beta, limit = gate
        for token in range(self.x.shape[0]):
            for e, weight in zip(self.ids[token], self.weights[token], strict=True):
                u, g = (self.w1[e].double() @ self.x[token].double()).chunk(2)
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
                hidden = g * torch.sigmoid(alpha * g) * (u + beta)
                out[token] += float(weight) * (self.w2[e].double() @ hidden)
        return out


@pytest.fixture
def case(device: torch.device) -> Case:
    return Case.random(device)


def make_layer(case: Case, key: str = "cutlass_bf16", **parts: Any) -> MoELayer:
    config = {
        "routing": RoutingConfig(EXPERTS, TOP_K),
        "quant": FORMATS[key][0],
        "experts": ExpertConfig(INTERMEDIATE),
        **parts,
    }
    return MoELayer(MoEConfig(**config), case.x.device)


def bf16_weights(case: Case) -> MoEWeightPack:
    pack = MoEWeightPack()
    pack.prepare_for(
        "cutlass_bf16", prepare.prepare_cutlass_bf16_weights(case.w1, case.w2, **SIZES)
    )
    return pack


def assert_near(out: torch.Tensor, target: torch.Tensor, limit: float) -> None:
    assert out.dtype == BF16 and out.shape == target.shape
    error = float((out.double() - target).norm() / target.norm())
    assert error <= limit, error


@pytest.mark.parametrize("key", FORMATS)
def test_prepared_weights_give_the_sum(case: Case, key: str) -> None:
    layer, act, given = make_layer(case, key), case.pack(), {}
    if key == "cutlass_fp8_per_tensor":
        given = {"hidden_states_scale_global": 0.02, "intermediate_scale_global": 0.02}
        codes, scale = prepare.prepare_cutlass_fp8_per_tensor_activations(
            case.x, hidden_states_scale_global=0.02
        )
        act = case.pack(hidden_states_q=codes, hidden_states_scale=scale)
    config = next(c for c in layer.config.backend.valid_for(90) if key == key_of(c))
    weights = MoEWeightPack()
    weights.prepare_for(key, config.prepare_weights(case.w1, case.w2, **given, **SIZES))
    assert layer.winner_backend is None
    assert_near(layer(act, weights), case.expected(), FORMATS[key][1])
    assert layer.winner_backend == key
    layer.reset_winner()
    assert layer.winner_backend is None


def key_of(config: Any) -> str:
    runner = getattr(fused_moe, type(config).__name__.replace("Config", "Runner"))
    return runner.backend_key


def test_packed_experts(case: Case) -> None:
    layer, weights = make_layer(case), bf16_weights(case)
    bits = case.weights.to(BF16).view(torch.int16).int() & 0xFFFF
    packed = case.pack(topk_ids=case.ids << 16 | bits, topk_weights=None)
    assert torch.equal(layer(packed, weights), layer(case.pack(), weights))


def test_constants_of_the_gate(case: Case) -> None:
    layer = make_layer(case, activation=SwiGLU(1.7, 1.0, 0.5))
    out = layer(case.pack(), bf16_weights(case))
    assert_near(out, case.expected((1.7, 1.0, 0.5)), 0.01)


@pytest.mark.parametrize(
    ("kind", "gated", "fields"),
    [
        (fused_moe.GELU, False, {}),
        (fused_moe.ReLU, False, {}),
        (fused_moe.SiLU, False, {}),
        (fused_moe.GeGLUTanh, True, {}),
        (fused_moe.SwiGLUStep, True, {"limit": 7.0}),
        (
            fused_moe.SiTU,
            True,
            {"gate_scale": 4.0, "linear_scale": 25.0, "clamp_limit": None},
        ),
    ],
)
def test_activations_without_a_kernel(
    case: Case, kind: type[fused_moe.ActivationConfig], gated: bool, fields: dict[str, Any]
) -> None:
    """They are values like the others, and no layer is made with one."""
    activation = kind()
    assert dataclasses.asdict(activation) == fields and activation.is_gated == gated
    assert activation.type.name.lower() == kind.__name__.lower()
    allowed = "`activation` must be one of SwiGLU, GeGLU, ReLU2, Identity, got "
    with pytest.raises(ValueError, match=allowed + kind.__name__):
        make_layer(case, activation=activation)


def test_ranks_sum_to_the_whole(case: Case) -> None:
    total = torch.zeros(case.x.shape, dtype=torch.float64, device=case.x.device)
    for first in (0, 2):
        part = dataclasses.replace(case, w1=case.w1[first:][:2], w2=case.w2[first:][:2])
        weights = MoEWeightPack({"cutlass_bf16": {"fc1": part.w1, "fc2": part.w2}})
        layer = make_layer(case, experts=ExpertConfig(INTERMEDIATE, first, 2))
        total += layer(case.pack(), weights).double()
    target = case.expected()
    assert float((total - target).norm()) < 0.01 * float(target.norm())


def test_llama4_weighs_tokens_before_the_experts(case: Case) -> None:
    routing = RoutingConfig(EXPERTS, 1, RoutingMethodType.Llama4)
    case.ids, case.weights = case.ids[:, :1].contiguous(), case.weights[:, :1].contiguous()
    out = make_layer(case, routing=routing)(case.pack(), bf16_weights(case))
    case.x = (case.x.float() * case.weights).to(BF16)
    case.weights = torch.ones_like(case.weights)
    assert_near(out, case.expected(), 0.01)


@pytest.mark.parametrize("method", [m for m in RoutingMethodType if m.name not in REFUSED])
def test_experts_follow_from_logits(case: Case, method: RoutingMethodType) -> None:
    if case.x.device.type != "cuda":
        pytest.skip("logits are routed by a kernel")
    top_k = 1 if method == RoutingMethodType.Llama4 else TOP_K
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    bias = torch.rand(EXPERTS, device="cuda") if method.name in BIASED else None
    routing = RoutingConfig(EXPERTS, top_k, method, routed_scaling_factor=1.5)
    scores = logits.softmax(-1) if method.value in (0, 1, 4) else logits.sigmoid()
    case.ids = (scores if bias is None else scores + bias).topk(top_k).indices.int()
    case.weights = scores.gather(1, case.ids.long())
    if method.name in RENORMALISED:
        case.weights = case.weights / case.weights.sum(-1, keepdim=True)
    case.weights = case.weights * 1.5
    layer, weights = make_layer(case, routing=routing), bf16_weights(case)
    act = MoEActivationPack(
        case.x,
        None,
        routing_input_mode=RoutingInputMode.FromLogits,
        routing_logits=logits,
        routing_bias=bias,
    )
    target = layer(case.pack(), weights)
    assert_near(layer(act, weights), target.double(), 0.01)


def test_four_bit_codes_are_the_nearest() -> None:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes]).repeat(2)[:32]
    codes, scale = prepare._mxfp4((values * 8).view(1, 1, 32).bfloat16())
    assert int(scale) == 127 + 3
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten()
    assert torch.equal(unpacked, torch.arange(16).repeat(2).to(torch.uint8) * (values != 0))
    # Halfway the even code is taken; a group of zeros has the least scale.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 56).bfloat16()
    codes, scale = prepare._mxfp4(ties.view(1, 1, 64))
    assert (codes[0, 0, :4] & 15).tolist() == [0, 2, 4, 6]
    assert (codes[0, 0, :4] >> 4).tolist() == [2, 4, 6, 7]
    assert scale.flatten().tolist() == [127, 0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"quant": QuantConfig(QuantFormat.NVFP4, QuantFormat.NVFP4)}, "`config` has no backend"),
        ({"activation": fused_moe.ActivationConfig()}, "`activation` must be one of SwiGLU"),
        ({"experts": ExpertConfig(INTERMEDIATE, 1, 2)}, "`local_num_experts` must divide"),
        ({"experts": ExpertConfig(INTERMEDIATE, 0, 3)}, "`local_num_experts` must divide"),
        ({"routing": 3}, "`routing` must be a RoutingConfig"),
        ({"finalize": fused_moe.MoEFinalizeConfig(do_finalize=False)}, "`do_finalize`"),
    ],
)
def test_what_no_layer_can_be(case: Case, parts: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_layer(case, **parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_ids": None}, "`topk_ids` must be given"),
        ({"hidden_states_scale": torch.ones(1)}, "`act` no scales of activations"),
        ({"routing_input_mode": RoutingInputMode.FromLogits}, "`routing_logits` must be given"),
        (
            {"topk_weights": None, "routing_input_mode": RoutingInputMode.UnpackedPrecomputed},
            "`topk_weights` must be given",
        ),
    ],
)
def test_what_a_call_may_not_be(case: Case, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(case)(case.pack(**changes), bf16_weights(case))


def test_a_layer_needs_the_view_of_its_backend(case: Case) -> None:
    with pytest.raises(ValueError, match="`weights` must have a view of cutlass_bf16"):
        make_layer(case)(case.pack(), MoEWeightPack())
    with pytest.raises(KeyError, match="backend_key"):
        MoEWeightPack().get_view("cutlass_bf16")
