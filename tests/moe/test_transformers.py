"""Mixtures of transformers on random weights, against `cutlass_fused_moe` with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.fused_moe import ActivationType, cutlass_fused_moe, fused_topk_deepseek

HIDDEN, INTERMEDIATE, TOKENS = 128, 64, 21
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": 4, "experts_implementation": "eager"}


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    pytest.importorskip("transformers")  # here, as every collection would pay for its import
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def random_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Random parameters and buffers, rounded to bfloat16 and computed with in float32."""
    torch.manual_seed(6)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape) * (tensor.shape[-1] ** -0.5)
        tensor.data = tensor.data.to(device, torch.bfloat16).float()
    return module.eval()


def values_first(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of gates and values in the other order."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1).bfloat16().contiguous()


def qwen3() -> torch.nn.Module:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as model

    config = model.Qwen3MoeConfig(
        num_experts=16, moe_intermediate_size=INTERMEDIATE, norm_topk_prob=True, **SIZES
    )
    return model.Qwen3MoeSparseMoeBlock(config)


def mixtral() -> torch.nn.Module:
    from transformers.models.mixtral import modeling_mixtral as model

    sizes = {**SIZES, "num_experts_per_tok": 2}
    config = model.MixtralConfig(num_local_experts=8, intermediate_size=INTERMEDIATE, **sizes)
    return model.MixtralSparseMoeBlock(config)


def routed_by_softmax(module: Any, x: torch.Tensor) -> torch.Tensor:
    _, weights, experts = module.gate(x)
    return cutlass_fused_moe(
        x.bfloat16(),
        experts,
        weights.float(),
        values_first(module.experts.gate_up_proj.data),
        module.experts.down_proj.data.bfloat16(),
        torch.bfloat16,
        [],
    )[0].float()


def deepseek() -> torch.nn.Module:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model

    config = model.DeepseekV3Config(
        num_local_experts=32,
        n_routed_experts=32,
        moe_intermediate_size=INTERMEDIATE,
        n_group=8,
        topk_group=4,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        **SIZES,
    )
    return model.DeepseekV3MoE(config)


def routed_by_groups(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate = module.gate
    values = torch.empty(x.shape[0], 4, device=x.device)
    indices = torch.empty(x.shape[0], 4, device=x.device, dtype=torch.int32)
    scores = x @ gate.weight.T
    fused_topk_deepseek(scores, gate.e_score_correction_bias, 8, 4, 4, 2.5, values, indices)
    result = cutlass_fused_moe(
        x.bfloat16(),
        indices,
        values,
        values_first(module.experts.gate_up_proj.data),
        module.experts.down_proj.data.bfloat16(),
        torch.bfloat16,
        [],
    )[0].float()
    return result + module.shared_experts(x)


def gpt_oss() -> torch.nn.Module:
    from transformers.models.gpt_oss import modeling_gpt_oss as model

    config = model.GptOssConfig(num_local_experts=16, intermediate_size=INTERMEDIATE, **SIZES)
    return model.GptOssMLP(config)


def with_biases(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Gates and values take turns in its columns; alpha 1.702, beta 1, limit 7."""
    experts = module.experts
    rows = experts.gate_up_proj.data.transpose(1, 2)
    bias = experts.gate_up_proj_bias.data
    _, weights, chosen = module.router(x)
    constants = [torch.full((16,), c, device=x.device) for c in (experts.alpha, 1.0, experts.limit)]
    return cutlass_fused_moe(
        x.bfloat16(),
        chosen,
        weights.float(),
        torch.cat([rows[:, 1::2], rows[:, ::2]], dim=1).bfloat16().contiguous(),
        experts.down_proj.data.transpose(1, 2).bfloat16().contiguous(),
        torch.bfloat16,
        [],
        torch.cat([bias[:, 1::2], bias[:, ::2]], dim=1).bfloat16(),
        experts.down_proj_bias.data.bfloat16(),
        swiglu_alpha=constants[0],
        swiglu_beta=constants[1],
        swiglu_limit=constants[2],
        activation_type=ActivationType.SwigluBias,
    )[0].float()


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (qwen3, routed_by_softmax),
        (mixtral, routed_by_softmax),
        (deepseek, routed_by_groups),
        (gpt_oss, with_biases),
    ],
    ids=lambda function: function.__name__,
)
def test_a_layer_of_transformers(
    device: torch.device,
    make: Callable[[], torch.nn.Module],
    ours: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    module = random_module(make(), device)
    x = torch.randn(1, TOKENS, HIDDEN).to(device, torch.bfloat16).float()
    with torch.no_grad():
        target = module(x)
        target = (target[0] if isinstance(target, tuple) else target).reshape(TOKENS, HIDDEN)
        result = ours(module, x[0])
    error = (result - target).norm() / target.norm()
    assert float(error) < 0.01, float(error)
