"""Which attention kernel a plan takes: what is served, what is refused, what ``auto`` picks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._attention.plan import choice as backends
from flashinfer._attention.plan.choice import KernelChoice, choose_kernel
from flashinfer._attention.plan.requests import (
    ArgumentNames,
    AttentionProblem,
    PlanTensors,
    Requests,
)
from flashinfer._attention.plan.spec import AttentionSpec
from flashinfer._attention.plan.speeds import SPEEDS
from flashinfer._attention.plan.tiles import HOPPER_PLAN_TILES, hopper_tiles
from flashinfer.jit import current_compilation_context
from flashinfer.jit.attention import (
    AttentionConfig,
    gen_attention_module,
    gen_customize_batch_prefill_module,
    gen_single_prefill_module,
    hopper,
    make_variant,
)

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA = torch.device("cuda", 0)
SERVED = AttentionConfig(BF16, BF16, BF16, 128, 128, 128, backend="fa3")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    """Every device counts as a GPU of compute capability 9.0, and ``auto`` is free to choose."""
    monkeypatch.setattr(backends, "is_hopper", lambda device: True)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0")
    current_compilation_context.reset()


def variant(hook: str = "") -> Any:
    declaration = f"struct Mine : AttentionVariantBase {{ {hook} }};"
    return make_variant("mine", [], [], [], [], "Mine", declaration)


QUERY_HOOK = "REGISTER_QUERY_TRANSFORM(params, q, { return q; })"
NO_SOFTMAX = "static constexpr bool use_softmax = false;"
KEY_HOOK = "template <typename P, typename T> T KeyTransform(const P& params, T k) const;"


# ---- Modules ----


@pytest.mark.usefixtures("target")
def test_a_module_for_hopper_is_of_its_own_source_and_target():
    spec = gen_attention_module(SERVED)
    assert [path.name for path in spec.sources][0] == "attention_hopper.cu"
    assert spec.name == "attention_bf16_bf16_bf16_qk128_vo128_tile128_paged_fa3"
    assert SERVED.majors == (9,) and SERVED.defines["FLASHINFER_CFG_BACKEND"] == "fa3"
    # wgmma is not in sm_90, and there is nothing of it in sm_80.
    assert spec.extra_cuda_cflags == ["-gencode=arch=compute_90a,code=sm_90a"]
    portable = gen_attention_module(dataclasses.replace(SERVED, backend="fa2"))
    assert [path.name for path in portable.sources][0] == "attention.cu"
    assert portable.name == spec.name.removesuffix("_fa3") and not portable.extra_cuda_cflags


def test_targets_without_hopper_have_no_module_for_it(monkeypatch: pytest.MonkeyPatch):
    for archs, expected in (("8.0 12.0a", False), ("8.0 9.0a", True)):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", archs)
        current_compilation_context.reset()
        assert gen_attention_module(SERVED).has_target() == expected


@pytest.mark.usefixtures("target")
def test_generators_take_the_backend_by_name():
    types = (BF16, BF16, BF16)
    spec = gen_single_prefill_module("fa3", *types, 256, 256, 0, False, True, False)
    assert spec.config == AttentionConfig(
        *(*types, 256, 256, 128, False, "causal"), logits_soft_cap=True, backend="fa3"
    )
    for backend in ("auto", "fa2"):
        named = gen_single_prefill_module(backend, *types, 128, 128, 0, False, False, False)
        assert named.config.backend == "fa2"
    custom = ("mine", *types, torch.int32, 128, 128, [], [], [], [], "Mine")
    declaration = "struct Mine : AttentionVariantBase {};"
    spec = gen_customize_batch_prefill_module("fa3", *custom, declaration)
    assert spec.config.backend == "fa3" and spec.config.custom_variant
    with pytest.raises(ValueError, match="`backend`.*QueryTransform"):
        gen_customize_batch_prefill_module("fa3", *custom, variant(QUERY_HOOK).declaration)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype_kv": FP16}, "`kv_data_type`"),
        ({"dtype_q": E4M3}, "`kv_data_type`"),
        ({"dtype_q": torch.float32, "dtype_kv": E4M3}, "`q_data_type`.*float32"),
        ({"head_dim_qk": 80, "head_dim_vo": 80}, "`backend`.*80/80.* 192/128"),
        ({"head_dim_qk": 128, "head_dim_vo": 64}, "`backend`.*128/64"),
        ({"head_dim_qk": 512, "head_dim_vo": 512}, "`backend`.*512/512"),
        ({"pos_encoding": "rope_llama"}, "`backend`.*ROPE_LLAMA"),
        ({"tile_q_second": 16}, "`backend`.*prefill and decode"),
        ({"tile_q": 64}, "`tile_q`"),
        ({"backend": "fa4"}, "`backend`"),
    ],
)
def test_a_configuration_without_a_kernel_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SERVED, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype_q": FP16, "dtype_kv": FP16},
        {"dtype_q": E4M3, "dtype_kv": E4M3, "tile_q": hopper.hopper_tile_q(128, 128, E4M3)},
        {"dtype_kv": E4M3},
        {"dtype_q": FP16, "dtype_kv": E5M2, "paged": False},
        *(
            {"head_dim_qk": qk, "head_dim_vo": vo, "tile_q": hopper.hopper_tile_q(qk, vo)}
            for qk, vo in hopper.HEAD_DIMS
        ),
        *({"mask_mode": mode} for mode in ("causal", "custom", "multi_item")),
        {"pos_encoding": "alibi", "logits_soft_cap": True, "sinks": True, "sliding_window": True},
        {"paged": False, "custom_variant": True},
    ],
)
def test_configurations_with_a_kernel(fields: dict[str, Any]):
    assert dataclasses.replace(SERVED, **fields).uri.endswith("_fa3")


def test_kv_tiles_are_known_and_fit():
    for qk, vo in hopper.HEAD_DIMS:
        tile = hopper_tiles(torch.bfloat16, torch.bfloat16, qk, vo).tile_kv
        assert tile in HOPPER_PLAN_TILES
        wide = hopper_tiles(torch.bfloat16, torch.float8_e4m3fn, qk, vo).tile_kv
        eight = hopper_tiles(torch.float8_e4m3fn, torch.float8_e4m3fn, qk, vo).tile_kv
        assert {wide, eight} <= set(HOPPER_PLAN_TILES)
        query_and_two_stages = 2 * (hopper.hopper_tile_q(qk, vo) * qk + 2 * tile * (qk + vo))
        assert query_and_two_stages <= 227 << 10


# ---- What auto takes ----


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TENSORS = PlanTensors._fields
REQUESTS = tuple(name for name in Requests._fields if name not in ("causal", "window_left"))


def problem(qo_lens: list[int], group: int = 4, **options: Any) -> AttentionProblem:
    indptr = torch.tensor([0, *qo_lens]).cumsum(0).int()
    page_size = options.get("page_size", 0)
    heads = {"num_qo_heads": 2 * group, "num_kv_heads": 2, "head_dim_qk": 128, "head_dim_vo": 128}
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16, "o_data_type": BF16}
    named = {name: options.pop(name) for name in (*REQUESTS, *TENSORS) if name in options}
    tensors = PlanTensors(**{name: named.pop(name) for name in TENSORS if name in named})
    lengths = {
        "qo_indptr": indptr,
        "kv_indptr": indptr,
        "last_page_len": torch.full((len(qo_lens),), page_size).int() if page_size else None,
    }
    spec = AttentionSpec(**{**heads, **dtypes, "sm_scale": 1.0, **options})
    requests = Requests(
        **{
            "argument_names": ArgumentNames.DECODE,
            "causal": spec.causal,
            "window_left": spec.window_left,
            **lengths,
            **named,
        }
    )
    found = AttentionProblem(spec, requests, tensors)
    return found if tensors.mask is None else found.with_mask(tensors.mask)


# Eight requests of 4096 keys that decode some tokens each.
DRAFTS = {"qo_indptr": None, "kv_indptr": int32(*range(0, 8 * 4096 + 1, 4096))}


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("qo_lens", "options", "expected"),
    [
        ([2048], {}, "fa3"),
        ([128], {"kv_indptr": int32(0, 4000)}, "fa3"),  # 512 packed rows
        ([2], {"kv_indptr": int32(0, 4000)}, "fa2"),
        ([16], {}, "fa2"),  # too few keys for the longer way from launch to first product
        ([2048], {"kv_indptr": int32(0, 128), "page_size": 16}, "fa3"),
        ([8192], {"page_size": 1}, "fa2"),  # copied by threads
        ([1] * 7, {"kv_indptr": int32(*range(0, 7000, 999))}, "fa2"),  # decode
        ([1] * 300, {"kv_indptr": int32(*range(0, 300 * 999 + 1, 999))}, "fa2"),
        ([2048, *[1] * 300], {}, "fa3"),  # decode with a prompt among it
        ([], {}, "fa2"),
        ([1], {"qo_indptr": None}, "fa2"),
        ([0], {}, "fa2"),
        ([2048], {"causal": True, "window_left": 900, "logits_soft_cap": 3.0}, "fa3"),
        ([2048], {"pos_encoding_mode": "ALIBI"}, "fa3"),
        ([2048], {"pos_encoding_mode": "ROPE_LLAMA"}, "fa2"),
        ([2048], {"kv_data_type": E4M3}, "fa3"),
        ([1], {"kv_data_type": E4M3}, "fa2"),
        ([2048], {"head_dim_qk": 192}, "fa3"),
        ([2048], {"head_dim_qk": 80, "head_dim_vo": 80}, "fa2"),
        ([2048], {"variant": variant()}, "fa3"),
        ([2048], {"variant": variant(NO_SOFTMAX)}, "fa3"),
        ([2048], {"variant": variant(QUERY_HOOK)}, "fa2"),
        ([2048], {"variant": variant(KEY_HOOK)}, "fa2"),
        ([2048], {"backend": "fa2"}, "fa2"),
        ([1], {"backend": "fa3"}, "fa3"),
        ([1], {"q_data_type": E4M3, "kv_data_type": E4M3}, "fa3"),
        ([1], {"qo_indptr": None, "backend": "fa3"}, "fa3"),
        ([16] * 8, {**DRAFTS, "tokens_per_request": 16}, "fa3"),
        ([4] * 8, {**DRAFTS, "tokens_per_request": 4}, "fa2"),  # nearly empty tiles
    ],
)
def test_what_is_chosen(qo_lens: list[int], options: dict[str, Any], expected: str):
    backend, tile_q, _ = choose_kernel(problem(qo_lens, **options), CUDA)
    expected_tile = 192 if options.get("q_data_type") == E4M3 else 128
    assert backend == expected and (backend == "fa2" or tile_q == expected_tile)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "fa2"},
        {"qo_indptr": None},
        {"head_dim_qk": 80, "head_dim_vo": 80},
        {"variant": variant(NO_SOFTMAX)},
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_queries_of_8_bits_of_the_portable_kernel(options: dict[str, Any]):
    types = {"q_data_type": E4M3, "kv_data_type": E4M3}
    assert choose_kernel(problem([2048], **types, **options), CUDA).backend == "fa2"


def test_queries_of_8_bits_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "is_hopper", lambda device: False)
    types = {"q_data_type": E4M3, "kv_data_type": E5M2}
    assert choose_kernel(problem([2048], **types), CUDA).backend == "fa2"


def test_there_is_a_rule_for_every_head_size():
    assert set(SPEEDS) == set(hopper.HEAD_DIMS)


@pytest.mark.compiler
@pytest.mark.usefixtures("on_hopper")
def test_what_depends_on_the_batch_is_not_chosen_for_results_that_must_not():
    for lengths in ([2048], [1], [1] * 64):
        assert choose_kernel(problem(lengths), CUDA, fixed_split_size=True)[0] == "fa3"
    drafts = problem([16] * 8, **DRAFTS, tokens_per_request=16)
    assert choose_kernel(drafts, CUDA, fixed_split_size=True)[0] == "fa2"
    other = problem([2048], head_dim_qk=160, head_dim_vo=160)
    assert choose_kernel(other, CUDA, fixed_split_size=True)[0] == "fa2"
    assert choose_kernel(problem([2048]), CUDA, second=problem([1]))[0] == "fa2"


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"head_dim_vo": 80}, "128/80"),
        ({"head_dim_vo": 80, "kv_data_type": E4M3}, "128/80"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "ROPE_LLAMA"),
        ({"variant": variant(KEY_HOOK)}, "KeyTransform"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_forcing_what_is_not_served_says_what_is_missing(options: dict[str, Any], missing: str):
    with pytest.raises(ValueError, match=f"`backend` must be 'auto' or 'fa2'.*{missing}"):
        choose_kernel(problem([2048], backend="fa3", **options), CUDA)
    with pytest.raises(ValueError, match="prefill and decode together"):
        choose_kernel(problem([2048], backend="fa3"), CUDA, second=problem([1]))


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of a compute capability, of which only that is asked."""
    index = 63  # what is remembered of it disturbs nobody
    monkeypatch.setattr(torch.cuda, "device_count", lambda: index + 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    device = torch.device("cuda", index)
    yield device
    backends.is_hopper.cache_clear()
    flashinfer._common.arch._CAPABILITIES.pop(device, None)


@pytest.mark.compiler
@pytest.mark.parametrize("gpu", [(8, 0), (9, 0), (10, 0), (12, 0)], indirect=True)
def test_only_hopper_has_it(gpu: torch.device, request: pytest.FixtureRequest):
    is_hopper = request.node.callspec.params["gpu"] == (9, 0)
    expected = "fa3" if is_hopper else "fa2"
    assert choose_kernel(problem([2048]), gpu) == KernelChoice(expected, 128)
    options = (0, False, False, BF16, BF16)
    assert utils.determine_attention_backend(gpu, *options) == expected
    assert utils.determine_attention_backend(gpu, *options, head_dim_qk=192, head_dim_vo=128) == (
        expected
    )
    assert utils.determine_attention_backend(gpu, *options, head_dim_qk=80) == "fa2"
    assert utils.determine_attention_backend(gpu, 1, *options[1:]) == "fa2"
    if not is_hopper:
        with pytest.raises(ValueError, match="`backend`.*compute capability 9.0"):
            choose_kernel(problem([2048], backend="fa3"), gpu)


def test_questions_of_serving_engines():
    served = (0, False, True, BF16, BF16)
    assert utils.is_fa3_backend_supported(*served)
    assert utils.is_fa3_backend_supported(2, False, False, FP16, FP16)
    for changes in ((1, False, True, BF16, BF16), (0, True, True, BF16, BF16)):
        assert not utils.is_fa3_backend_supported(*changes)
    assert utils.is_fa3_backend_supported(0, False, False, BF16, E4M3)
    assert utils.is_fa3_backend_supported(0, False, False, FP16, E5M2)
    assert not utils.is_fa3_backend_supported(0, False, False, BF16, FP16)
    assert not utils.is_fa3_backend_supported(0, False, False, E4M3, BF16)
    assert utils.is_fa3_backend_supported(0, False, False, E4M3, E4M3)
    assert utils.is_fa3_backend_supported(0, False, False, E5M2, E4M3)
    assert utils.is_fa3_prefill_head_dim_supported(192, 128)
    assert not utils.is_fa3_prefill_head_dim_supported(128, 192)
    no_gpu = utils.determine_attention_backend(torch.device("cpu"), *served)
    assert no_gpu == "fa2"
