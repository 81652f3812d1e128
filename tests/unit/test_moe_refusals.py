"""Mixtures and their routing refuse by the names that callers know, before any GPU work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.comm import dcp_alltoall
from flashinfer.gemm import prepared

BF16, I32 = torch.bfloat16, torch.int32
on_the_cpu = [pytest.mark.compiler, pytest.mark.usefixtures("bindings_on_the_cpu")]


def mixture(**change: Any) -> dict[str, Any]:
    return {
        "input": torch.zeros(2, 64, dtype=BF16),
        "token_selected_experts": torch.zeros(2, 1, dtype=I32),
        "token_final_scales": torch.zeros(2, 1),
        "fc1_expert_weights": torch.zeros(2, 64, 64, dtype=BF16),
        "fc2_expert_weights": torch.zeros(2, 64, 32, dtype=BF16),
        "output_dtype": BF16,
        "quant_scales": None,
        **change,
    }


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        (torch.empty(64, device="meta"), "`workspace_buffer` must be on cpu .* got meta"),
        (torch.empty(64)[::2], "`workspace_buffer` must be contiguous"),
        (torch.empty(64), "`input` must be a CUDA tensor"),
    ],
)
def test_a_workspace_on_another_device(workspace: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_moe.cutlass_fused_moe(**mixture(workspace_buffer=workspace))


def test_a_scratchpad_on_another_device() -> None:
    codes = [torch.zeros(2, n, 128).to(torch.float8_e4m3fn) for n in (256, 128)]
    scales = [torch.ones(2, n, 1) for n in (2, 1)]
    call = torch.zeros(1, 128, dtype=BF16), torch.zeros(1, 2), codes[0], scales[0], codes[1]
    pad = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="`scratchpad` must be on cpu .* got meta"):
        fused_moe.mono_moe(*call, scales[1], 1, scratchpad=pad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.zeros(2, 1)}, "`topk_ids` must have dtype"),
        ({"topk_weights": torch.zeros(1, 1)}, "`topk_weights` must have shape"),
        ({"hidden_states_q": torch.zeros(2, 64)}, "`hidden_states_q` must have dtype"),
    ],
)
def test_a_layer_says_what_its_packs_say(change: dict[str, Any], message: str) -> None:
    call = mixture()
    config = fused_moe.MoEConfig(
        fused_moe.RoutingConfig(2, 1, fused_moe.RoutingMethodType.Renormalize),
        fused_moe.QuantConfig(),
        fused_moe.ExpertConfig(32),
    )
    layer, weights = fused_moe.MoELayer(config, "cpu"), fused_moe.MoEWeightPack()
    view = {"fc1": call["fc1_expert_weights"], "fc2": call["fc2_expert_weights"]}
    weights.prepare_for("cutlass_bf16", view)
    pack = {
        "hidden_states_q": call["input"],
        "hidden_states_scale": None,
        "topk_ids": call["token_selected_experts"],
        "topk_weights": call["token_final_scales"],
        **change,
    }
    with pytest.raises(ValueError, match=message):
        layer(fused_moe.MoEActivationPack(**pack), weights)


class TestRouting:
    pytestmark = on_the_cpu

    @pytest.mark.parametrize("factor", [1e39, -1e39])
    def test_a_factor_that_float32_does_not_hold(self, factor: float) -> None:
        call = torch.zeros(2, 8), torch.zeros(8), 1, 1, 2
        results = torch.zeros(2, 2), torch.zeros(2, 2, dtype=I32)
        with pytest.raises(ValueError, match="`routed_scaling_factor` must be finite in float32"):
            fused_moe.fused_topk_deepseek(*call, factor, *results)
        with pytest.raises(ValueError, match="must be a CUDA tensor"):
            fused_moe.fused_topk_deepseek(*call, -2.5, *results)

    def test_more_logits_than_int32_counts(self) -> None:
        logits = torch.zeros(60_000).as_strided((40_000, 60_000), (0, 1))
        ids, table = torch.zeros(40_000, dtype=I32), torch.zeros(5, 2, dtype=I32)
        with pytest.raises(ValueError, match=r"`router_logits` must have less than 2\^31 elements"):
            fused_moe.hash_topk(logits, ids, table)


@pytest.mark.parametrize("out", [(None, None), (torch.zeros(1, 2, 4), None), torch.zeros(2), (1,)])
def test_results_of_an_exchange_that_are_no_tensors(out: Any, monkeypatch) -> None:
    monkeypatch.setattr(dcp_alltoall, "opened", lambda *arguments: SimpleNamespace())
    x, stats = torch.zeros(1, 2, 4), torch.zeros(1, 2, 1)
    with pytest.raises(TypeError, match=r"`out(\[[01]\])?` must be a"):
        dcp_alltoall.decode_cp_a2a_alltoall(x, stats, torch.zeros(1), 0, 2, out=out)


@pytest.mark.parametrize("name", ["out_q", "out_s"])
def test_a_prepared_product_names_its_destinations(name: str) -> None:
    e4m3 = torch.float8_e4m3fn
    call: dict[str, Any] = {
        "a": torch.zeros(128, 128).to(e4m3),
        "b": torch.zeros(1, 256, 128).to(e4m3),
        "a_scale": torch.ones(128, 1),
        "b_scale": torch.ones(1, 2, 1),
        "m_indices": torch.zeros(128, dtype=I32),
        name: torch.zeros(3),
    }
    with pytest.raises(ValueError, match=f"`{name}` must have shape"):
        prepared.prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant(**call)
