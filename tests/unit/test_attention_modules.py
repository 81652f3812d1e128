"""Attention modules as they are described: configurations, variants, names. Little is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.planner import AttentionPlanner, PlanConfig
from flashinfer._attention.plan.requests import ArgumentNames, Requests
from flashinfer.decode import get_batch_decode_jit_module
from flashinfer.jit.attention import (
    AttentionConfig,
    choose_tile_q,
    gen_attention_module,
    gen_batch_attention_module,
    gen_batch_decode_module,
    gen_batch_prefill_module,
    gen_customize_batch_decode_module,
    gen_customize_batch_prefill_module,
    gen_customize_single_prefill_module,
    gen_pod_module,
    gen_single_prefill_module,
    get_attention_module,
    get_batch_decode_uri,
    get_pod_uri,
    make_variant,
)
from flashinfer.jit.attention.config import PACKED_FLOAT4, decode_tile_q
from flashinfer.prefill import get_batch_prefill_jit_module

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
BASE = AttentionConfig(BF16, BF16, BF16, 128, 128, 64)
OTHER: dict[str, Any] = {
    "dtype_kv": E4M3,
    "dtype_o": F16,
    "head_dim_qk": 192,
    "head_dim_vo": 64,
    "tile_q": 16,
    "paged": False,
    "mask_mode": "causal",
    "pos_encoding": "alibi",
    "sliding_window": True,
    "logits_soft_cap": True,
    "sinks": True,
    "tile_q_second": 16,
    "custom_variant": True,
    "head_scales": True,
}
OF_SECOND = {
    "mask_mode_second": "causal",
    "pos_encoding_second": "alibi",
    "sliding_window_second": True,
    "logits_soft_cap_second": True,
}


# ---- Configurations ----


def test_every_field_is_in_the_name_and_in_the_defines():
    two_shapes = dataclasses.replace(BASE, tile_q_second=16)
    changed = [dataclasses.replace(BASE, **{name: value}) for name, value in OTHER.items()]
    changed += [dataclasses.replace(two_shapes, **{k: v}) for k, v in OF_SECOND.items()]
    changed.append(AttentionConfig(F16, F16, BF16, 128, 128, 64))  # dtype_q
    changed.append(dataclasses.replace(BASE, tile_q=128))
    changed.append(dataclasses.replace(BASE, tile_q=128, backend="fa3"))
    changed.append(dataclasses.replace(BASE, tile_q=8, device_lengths=True))
    changed.append(dataclasses.replace(BASE, profiled=True))
    assert len({config.uri for config in [BASE, *changed]}) == len(changed) + 1
    assert len({tuple(c.defines.items()) for c in [BASE, *changed]}) == len(changed) + 1
    assert {f.name for f in dataclasses.fields(AttentionConfig)} == {
        *OTHER,
        *OF_SECOND,
        "dtype_q",
        "backend",
        "device_lengths",
        "profiled",
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("dtype_q", torch.float32),
        ("dtype_kv", F16),
        ("dtype_o", E4M3),
        ("head_dim_qk", 24),
        ("head_dim_qk", 528),
        ("head_dim_vo", 272),
        ("head_dim_vo", 544),
        ("head_dim_vo", 0),
        ("tile_q", 4),  # of 4-bit values alone
        ("tile_q", 32),
        ("mask_mode", "bidirectional"),
        *OF_SECOND.items(),
        ("tile_q_second", 128),
        ("pos_encoding", "rope"),
    ],
)
def test_what_has_no_kernel_is_refused(name: str, value: Any):
    named = {"dtype_q": "q_data_type", "dtype_kv": "kv_data_type", "dtype_o": "o_data_type"}
    named["pos_encoding"] = "pos_encoding_mode"
    with pytest.raises(ValueError, match=f"`{named.get(name, name)}`"):
        dataclasses.replace(BASE, **{name: value})


@pytest.mark.parametrize(
    "rows, mean, head_dim, fixed, tile",
    [
        (8, 4, 128, False, 8),
        (9, 4, 256, False, 16),
        (16, 1, 128, False, 16),
        (17, 1, 128, False, 64),
        (4, 4, 128, True, 64),  # the tile must not depend on the batch
        (1000, 64, 128, False, 64),
        (1000, 65, 128, False, 128),
        (1000, 1000, 128, True, 64),
        (1000, 1000, 256, False, 64),
        (1000, 1000, 512, False, 16),
        (8, 8, 512, False, 8),
        (8, 8, 512, True, 16),
    ],
)
def test_choice_of_the_tile(rows: int, mean: float, head_dim: int, fixed: bool, tile: int):
    assert choose_tile_q(rows, mean, head_dim, fixed) == tile


@pytest.mark.parametrize(
    "rows, dtype_kv, tile",
    [
        (1, PACKED_FLOAT4, 4),
        (4, PACKED_FLOAT4, 4),
        (5, PACKED_FLOAT4, 8),
        (9, PACKED_FLOAT4, 16),
        (4, BF16, 8),
        (4, E4M3, 8),
    ],
)
def test_choice_of_the_tile_for_decode(rows: int, dtype_kv: torch.dtype, tile: int):
    assert decode_tile_q(rows, 128, dtype_kv) == tile


# ---- Generators under public names ----


@pytest.fixture
def target(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")


@pytest.mark.usefixtures("target")
def test_public_generators_describe_modules_of_their_calls():
    types = (BF16, E4M3, BF16)
    decode = gen_batch_decode_module(*types, torch.int32, 128, 128, 0, True, False)
    assert decode.name == get_batch_decode_uri(*types, torch.int32, 128, 128, 0, True, False)
    assert decode.config == AttentionConfig(*types, 128, 128, 16, sliding_window=True)
    prefill = gen_single_prefill_module("fa2", *types, 256, 256, 2, False, True, False)
    assert prefill.config == AttentionConfig(
        *types, 256, 256, 64, False, "causal", "alibi", logits_soft_cap=True
    )
    both = gen_batch_attention_module(*types, torch.int32, 128, 128, 2, False, False)
    assert both.config.tile_q_second == 16 and both.config.pos_encoding == "alibi"
    pod = (*types, 128, 0, False, False, False, torch.int32, 0, False, False)
    assert gen_pod_module(*pod).name == get_pod_uri(*pod)
    assert gen_pod_module(*pod).config.tile_q_second == 16


@pytest.mark.usefixtures("target")
def test_parts_of_pod_modules_have_options_of_their_own():
    types = (F16, E4M3, F16)
    parts = ((0, True, False), (1, False, True))
    found = gen_pod_module(*types, 128, *parts[0], False, torch.int32, *parts[1]).config
    first = (found.pos_encoding, found.sliding_window, found.logits_soft_cap)
    assert first == ("none", True, False)
    second = (found.pos_encoding_second, found.sliding_window_second, found.logits_soft_cap_second)
    assert second == ("rope_llama", False, True)
    same = gen_pod_module(*types, 128, *parts[0], False, torch.int32, *parts[0]).config
    assert same.uri != found.uri and same.sliding_window_second


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda t: gen_batch_decode_module(*t, torch.int64, 128, 128, 0, False, False), "idtype"),
        (
            lambda t: gen_batch_decode_module(*t, torch.int32, 128, 128, 3, False, False),
            "pos_encoding_mode",
        ),
        (
            lambda t: gen_single_prefill_module("fa3", *t, 128, 64, 0, False, False, False),
            "backend",
        ),
        (
            lambda t: gen_batch_prefill_module(
                "fa2", *t, torch.int32, 128, 128, 0, False, False, True
            ),
            "use_fp16_qk_reduction",
        ),
        (
            lambda t: gen_pod_module(*t, 128, 0, True, False, False, torch.int32, 3, False, False),
            "pos_encoding_mode",
        ),
    ],
)
def test_public_generators_refuse(call, named: str):
    with pytest.raises(ValueError, match=f"`{named}`"):
        call((BF16, BF16, BF16))


# ---- Variants ----

DECLARATION = """
struct Scaled : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ Scaled(const Params& params, uint32_t, uint8_t*) {
    sm_scale_log2 = params.head_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + params.bias[qo_head_idx] +
           (params.maybe_shift == nullptr ? 0.f : float(params.maybe_shift[0])) + params.steps;
  })
};
"""
MEMBERS: tuple[Any, ...] = (
    *(["bias", "maybe_shift"], ["float", "int64_t"]),
    *(["head_scale", "steps"], ["double", "int32_t"]),
    *("Scaled", DECLARATION),
)
JIT_ARGS = ["scaled", BF16, BF16, BF16, torch.int32, 128, 128, *MEMBERS]


@pytest.mark.usefixtures("target")
def test_variants_are_told_apart_by_their_content():
    config = dataclasses.replace(BASE, custom_variant=True)
    first = gen_attention_module(config, make_variant("scaled", *MEMBERS))
    again = gen_attention_module(config, make_variant("scaled", *MEMBERS))
    edited = (*MEMBERS[:5], DECLARATION.replace("steps", "steps * 2"))
    other = gen_attention_module(config, make_variant("scaled", *edited))
    assert first.name == again.name != other.name
    headers = {path.name: path.read_text() for path in first.extra_include_paths[0].iterdir()}
    params = headers["attention_variant_params.h"]
    for member in ("float* bias;", "int64_t* maybe_shift;", "double head_scale;", "int32_t steps;"):
        assert member in params
    assert DECLARATION.strip() in headers["attention_variant.cuh"]
    custom = gen_customize_batch_decode_module(*JIT_ARGS)
    assert custom.config == dataclasses.replace(BASE, custom_variant=True, tile_q=16)
    assert gen_customize_batch_prefill_module("fa2", *JIT_ARGS).config.mask_mode == "causal"


@pytest.mark.parametrize(
    "position, value, error, named",
    [
        (0, "not a name", ValueError, "uri"),
        (0, 7, TypeError, "uri"),
        (7, "bias", TypeError, "additional_tensor_names"),
        (7, ["bias"], ValueError, "additional_tensor_names"),
        (7, ["bias", "bias"], ValueError, "additional_tensor_names"),
        (7, ["bias", "1st"], ValueError, "additional_tensor_names"),
        (8, ["float", "string"], ValueError, "additional_tensor_dtypes"),
        (7, ["bias", "kv_len"], ValueError, "additional_tensor_names"),
        (9, ["bias", "steps"], ValueError, "additional_tensor_names"),
        (9, ["num_qo_heads", "steps"], ValueError, "additional_scalar_names"),
        (10, ["double", "half"], ValueError, "additional_scalar_dtypes"),
        (11, "Scaled; struct X", ValueError, "variant_name"),
        (12, None, TypeError, "variant_decl"),
    ],
)
def test_bad_variants_are_refused(position: int, value: Any, error: type, named: str):
    args = [*JIT_ARGS]
    args[position] = value
    with pytest.raises(error, match=f"`{named}`"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024), jit_args=args)


@pytest.mark.parametrize(
    "keywords, named",
    [
        ({"jit_args": JIT_ARGS[:12]}, "jit_args"),
        ({"jit_kwargs": {"use_sliding_window": True}}, "jit_kwargs"),
        ({"jit_args": JIT_ARGS, "jit_kwargs": {"unroll": 4}}, "jit_kwargs"),
        ({"jit_args": JIT_ARGS, "jit_kwargs": {"fp8_enabled": True}}, "jit_kwargs"),
        ({"variant_owns_mask": True}, "variant_owns_mask"),
    ],
)
def test_bad_jit_arguments_are_refused(keywords: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=f"`{named}`"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024), **keywords)


@pytest.mark.parametrize(
    "keywords, named",
    [
        ({"head_dim": 64}, "head_dim_qk"),
        ({"q_data_type": F16}, "q_data_type"),
        ({"kv_data_type": "float8_e4m3fn"}, "kv_data_type"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
    ],
)
def test_plans_that_contradict_the_variant_are_refused(keywords: dict[str, Any], named: str):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024), jit_args=JIT_ARGS)
    one = torch.tensor([0, 1], dtype=torch.int32)
    arguments = {"head_dim": 128, **keywords}
    with pytest.raises(ValueError, match=f"`{named}`"):
        wrapper.plan(one, one[:1], one[1:], 8, 2, page_size=4, **arguments)


# As serving engines write them: a header of FlashInfer's, constructors for host and device too, no
# scale where there is no softmax, members that hide those of the built-in options.
ENGINE_VARIANT = """
#include <flashinfer/attention/variant_helper.cuh>
struct MaskedSigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint8_t* custom_mask_ptr;
  uint32_t window_left, qo_len, kv_len;
  float scale_log2e;
  template <typename Params>
  __device__ __host__ MaskedSigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    custom_mask_ptr = params.custom_mask;
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    scale_log2e = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (logits > 1e30f) printf("%d %d %f\\n", qo_idx, kv_idx, float(logits * math::loge2));
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale_log2e)));
  });
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return ((custom_mask_ptr[kv_idx / 8] >> (kv_idx % 8)) & 1);
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return output;
  });
};
"""


@pytest.mark.compiler
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("fields", [{"tile_q": 16}, {"tile_q": 64, "mask_mode": "custom"}])
def test_variants_of_engines_compile(fields: dict[str, Any]):
    members = (["custom_mask"], ["uint8_t"], ["sm_scale"], ["double"])
    variant = make_variant("masked_sigmoid", *members, "MaskedSigmoid", ENGINE_VARIANT)
    config = dataclasses.replace(BASE, custom_variant=True, **fields)
    assert get_attention_module(config, variant).variant is variant


def _bound_state(module: Any) -> torch.Tensor:
    """The launch of a planned request of five tokens, with memory of the CPU."""
    planner = AttentionPlanner()
    heads = {"num_kv_heads": 2, "group_size": 4, "head_dim_vo": 128}
    planner.configure(PlanConfig(**heads, tile_q=16, tile_q_second=0, tile_kv=64))
    indptr, last = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    workspace = torch.zeros(1 << 16, dtype=torch.uint8)
    requests = Requests(ArgumentNames.DECODE, None, indptr, last_page_len=last, page_size=4)
    planner.plan(workspace, -1, requests)
    launch = torch.zeros(module.launch_bytes, dtype=torch.uint8)
    pages = torch.zeros(2, dtype=torch.int32)
    module.bind(launch, planner.layout, workspace, workspace, pages, 8, 2, 4, False, False)
    return launch


@pytest.mark.compiler
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(
    "position, value, error, named",
    [
        (0, torch.zeros(8, dtype=F16), ValueError, "bias"),
        (0, None, TypeError, "bias"),
        (0, torch.zeros(16)[::2], ValueError, "bias"),
        (1, torch.zeros(1, dtype=torch.int32), ValueError, "maybe_shift"),
        (2, "1.0", TypeError, "head_scale"),
        (3, 1.5, TypeError, "steps"),
        (3, 2, ValueError, "bias"),  # nothing wrong but that nothing is on a GPU
    ],
)
def test_values_of_variants_are_checked(position: int, value: Any, error: type, named: str):
    variant = make_variant("scaled", *MEMBERS)
    config = dataclasses.replace(BASE, custom_variant=True, tile_q=16)
    module = get_attention_module(config, variant)
    state = _bound_state(module)
    q, cache = torch.zeros(1, 8, 128, dtype=BF16), torch.zeros(3, 2, 4, 2, 128, dtype=BF16)
    additional = [torch.zeros(8), torch.zeros(1, dtype=torch.int64), 0.5, 2]
    additional[position] = value
    with pytest.raises(error, match=f"`{named}`"):
        module.run(
            *(state, q, cache, None, torch.zeros_like(q), None, 1.0, 1.0, -1, None, None),
            *additional,
        )


@pytest.mark.compiler
@pytest.mark.usefixtures("target")
def test_a_loaded_variant_knows_what_it_is():
    spec = gen_customize_single_prefill_module("fa2", *JIT_ARGS[:4], *JIT_ARGS[5:])
    module = spec.build_and_load()
    assert module.config == spec.config and module.variant == make_variant("scaled", *MEMBERS)
    q, k = torch.zeros(3, 8, 128, dtype=BF16), torch.zeros(5, 2, 128, dtype=BF16)
    call = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    with pytest.raises(TypeError, match="the variant needs"):
        call(module, q, k, k, torch.zeros(8))
    with pytest.raises(ValueError, match="`mask_mode`"):
        call(module, q, k, k, torch.zeros(8), None, 1.0, 2, mask_mode=2)
    with pytest.raises(ValueError, match="`q` must be torch.bfloat16"):
        call(module, q.half(), k.half(), k.half(), torch.zeros(8), None, 1.0, 2)
    with pytest.raises(ValueError, match="CUDA"):
        call(module, q, k, k, torch.zeros(8), None, 1.0, 2)
    for named in (get_batch_decode_jit_module, get_batch_prefill_jit_module):
        assert named("scaled", module) is module
        with pytest.raises(ValueError, match="`module_name` must be 'scaled'"):
            named("other", module)
        with pytest.raises(TypeError, match="`jit_module`"):
            named("scaled", spec)
        with pytest.raises(ValueError, match="`jit_module`.* has no variant"):
            named("scaled", get_attention_module(dataclasses.replace(BASE, tile_q=16)))
