"""Every public function of tensors is an operator of compiled graphs, or is made of operators; the
exceptions are listed here and in docs/torch_compile.md."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import comm, deep_gemm, fused_moe, parallel_attention, quantization, topk
from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopK, TopP
from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace.calls import operations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENT = Path(__file__).parents[2] / "docs" / "torch_compile.md"
# Modules that look at tensors, and compute nothing of a model.
TOOLS = {
    "aot", "api_logging", "api_replay", "artifacts", "cli", "fi_trace", "jit", "profiler",
    "reference_backend", "testing", "trace", "utils",
}  # fmt: skip

Call = tuple[Callable[..., Any], dict[str, Any]]


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _top_k(function: Callable[..., Any], **table: torch.Tensor) -> Call:
    scores = torch.randn(3, 64, device=DEVICE)
    lengths = {"seq_lens": _int32(60, 20, 64)} if table else {}
    return function, {"logits": scores, **lengths, **table, "top_k": 8}


def _groups(function: Callable[..., Any], rows: tuple[int, ...], **counts: Any) -> Call:
    """Products in 8 bits with the weights of two groups."""
    a, b = torch.randn(*rows, 256, device=DEVICE), torch.randn(2, 128, 256, device=DEVICE)
    scales = torch.rand(*rows, 2, device=DEVICE), torch.rand(2, 1, 2, device=DEVICE)
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    out = torch.zeros(*rows, 128, dtype=torch.bfloat16, device=DEVICE)
    return function, {"a_fp8": (a, scales[0]), "b_fp8": (b, scales[1]), "d": out, **counts}


def _pipe() -> Call:
    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), Sample()])
    logits, seed = torch.randn(3, 50, device=DEVICE), torch.tensor([5], device=DEVICE)
    return pipe, {"x": logits, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "seed": seed}


def _prepared(function: Callable[..., Any], tensor: torch.Tensor, **rest: Any) -> Call:
    first = next(iter(inspect.signature(function).parameters))
    return function, {first: tensor, **rest}


def _adapters() -> Call:
    """LoRA for three tokens with two of four experts each, two slices."""
    tokens, half = torch.arange(6, device=DEVICE) // 2, torch.bfloat16
    return fused_moe.bgmv_moe, {
        "x": torch.randn(3, 64, dtype=half, device=DEVICE),
        "lora_a_weights": list(torch.randn(2, 3, 4, 8, 64, dtype=half, device=DEVICE)),
        "lora_b_weights": list(torch.randn(2, 3, 4, 16, 8, dtype=half, device=DEVICE)),
        "sorted_token_ids": tokens,
        "expert_ids": _int32(0, 3, 2, 1, 1, 0),
        "lora_indices": _int32(2, -1, 0),
        "topk_weights": torch.rand(6, device=DEVICE),
        "num_experts": 4,
    }


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)


# Made of operators, or of PyTorch's own.
CALLS_OPERATORS: dict[str, Callable[[], Call]] = {
    "topk_clusters_exact": lambda: _top_k(topk.topk_clusters_exact),
    "topk_clusters_page_table_transform": lambda: _top_k(
        topk.topk_clusters_page_table_transform,
        src_page_table=torch.arange(192, dtype=torch.int32, device=DEVICE).view(3, 64),
    ),
    "topk_clusters_ragged_transform": lambda: _top_k(
        topk.topk_clusters_ragged_transform, offsets=_int32(0, 64, 128)
    ),
    "m_grouped_fp8_gemm_nt_contiguous": lambda: _groups(
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
        (256,),
        m_indices=torch.arange(256, device=DEVICE, dtype=torch.int32) // 128,
    ),
    "m_grouped_fp8_gemm_nt_masked": lambda: _groups(
        deep_gemm.m_grouped_fp8_gemm_nt_masked, (2, 128), masked_m=_int32(128, 128), expected_m=64
    ),
    "LogitsPipe": _pipe,
    "bgmv_moe": _adapters,
    "convert_to_block_layout": lambda: _prepared(
        fused_moe.convert_to_block_layout, _bytes(4, 16), blockK=4
    ),
    "reorder_rows_for_gated_act_gemm": lambda: _prepared(
        fused_moe.reorder_rows_for_gated_act_gemm, _bytes(6, 5)
    ),
    "interleave_moe_weights_for_sm90_mixed_gemm": lambda: _prepared(
        fused_moe.interleave_moe_weights_for_sm90_mixed_gemm, _bytes(2, 4, 16)
    ),
    "interleave_moe_scales_for_sm90_mixed_gemm": lambda: _prepared(
        fused_moe.interleave_moe_scales_for_sm90_mixed_gemm, _bytes(2, 4, 16)
    ),
    "interleave_for_tma_wgmma_up": lambda: _prepared(
        fused_moe.interleave_for_tma_wgmma_up, _bytes(2, 128, 16).to(torch.float8_e4m3fn)
    ),
    "make_nvfp4_global_scale": lambda: _prepared(
        quantization.make_nvfp4_global_scale,
        torch.randn(6, 32, device=DEVICE),
        per_token_activation=True,
    ),
    "moe_a2a_wrap_payload_tensor_in_workspace": lambda: _prepared(
        comm.moe_a2a_wrap_payload_tensor_in_workspace,
        _bytes(4096),
        leading_shape=[2, 3],
        slice_start=256,
        slice_end=352,
        dtype=torch.int16,
    ),
    "split_varlen_input": lambda: _prepared(
        parallel_attention.split_varlen_input,
        _bytes(2, 7, 5),
        seq_len_list=[2, 5],
        world_size=2,
        rank=1,
    ),
}


@pytest.mark.parametrize("name", CALLS_OPERATORS)
def test_functions_that_call_operators_are_one_graph(name: str):
    torch._dynamo.reset()
    with contextlib.nullcontext() if DEVICE == "cuda" else flashinfer.reference_backend():
        function, arguments = CALLS_OPERATORS[name]()
        calls = [clone_arguments(arguments) for _ in range(2)]
        expected = function(**calls[0])
        compiled = torch.compile(lambda **a: function(**a), fullgraph=True, backend="aot_eager")
        actual = compiled(**calls[1])
    found = [[*iter_tensors(returned)] for returned in (actual, expected)]
    found += [[*iter_tensors(list(call.values()))] for call in calls]
    for first, second in (found[:2], found[2:]):
        assert len(first) == len(second)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))


def _functions() -> Iterator[tuple[str, str, Any]]:
    """Module, name and function for the public functions that take tensors."""
    modules = [flashinfer]
    for module in pkgutil.iter_modules(flashinfer.__path__):
        if module.name not in TOOLS and not module.name.startswith("_"):
            modules.append(importlib.import_module(f"flashinfer.{module.name}"))
    for module in modules:
        for name in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, name)
            is_question = name.startswith(("supports_", "can_"))
            if name.startswith("_") or is_question or not inspect.isfunction(value):
                continue
            function, own = inspect.unwrap(value), hasattr(module, "__all__")
            if not own and not function.__module__.startswith(module.__name__):
                continue  # imported for the module's own use
            parameters = inspect.signature(function).parameters.values()
            if any(re.search(r"\bTensor\b", str(p.annotation)) for p in parameters):
                yield module.__name__, name, value


# Every other function of tensors is one graph.
EXCEPTIONS = {
    "fast_decode_plan": "plans: reads lengths on the host",
    "moe_a2a_dispatch": "returns memory that other ranks write, and a number from a tensor",
    "moe_a2a_initialize": "opens a workspace",
    "decode_cp_a2a_init_workspace": "opens a workspace",
    "vllm_init_custom_ar": "opens a workspace",
    "ulysses_a2a": "refuses every call",
    "prepare_batch_deepgemm_fp8_nt_groupwise": "returns an object",
    "prepare_group_gemm_fp8_nt_groupwise_contiguous": "returns an object",
    "prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant": "returns an object",
    "nvfp4_quantize_paged_kv_cache": "returns numbers of the host",
    "prepare_bf16_kda_prefill": "returns an object",
    "prepare_tf32_kda_prefill": "returns an object",
    "replayssm_materialize": "takes addresses of tensors",
    "fill_w_ptr": "writes addresses of tensors",
    "bgmv_moe_shrink": "takes addresses of tensors",
    "bgmv_moe_expand": "takes addresses of tensors",
    "bgmv_moe_gemm1_lora_delta": "takes addresses of tensors",
    "bgmv_moe_gemm2_lora_delta": "takes addresses of tensors",
    "prepare_bgmv_moe": "returns an object",
}


def test_every_function_of_tensors_is_one_graph_or_an_exception():
    operators = {id(operation.function) for operation in operations()}
    outside = {
        name
        for _, name, function in _functions()
        if id(inspect.unwrap(function)) not in operators
        and not hasattr(function, "_torchdynamo_inline")
        and not hasattr(function, "refuses_every_call")
        and name not in CALLS_OPERATORS
    }
    assert outside == set(EXCEPTIONS)
    listed = DOCUMENT.read_text().partition("## What stays outside")[2].partition("\n## ")[0]
    missing = outside - set(re.findall(r"`([\w.]+)(?:\([^`]*)?`", listed))
    assert not missing, f"not in {DOCUMENT.name}: {', '.join(sorted(missing))}"
