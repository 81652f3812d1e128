"""Users' attention variants with NVRTC: one host part serves all variants of a configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer import jit
from flashinfer.jit import env as jit_env
from flashinfer.jit import host_parts_build, nvrtc, registry
from flashinfer.jit.attention import get_attention_module, make_variant
from flashinfer.jit.attention.mla import MlaConfig
from flashinfer.jit.attention.modules import gen_attention_module
from flashinfer.jit.attention.plan import gen_attention_plan_module
from flashinfer.jit.attention.variant import HOST_PART_SLOTS, SCALAR_TYPES
from tests.unit.test_attention_modules import BASE, BF16, F16, MEMBERS, _bound_state

CONFIG = dataclasses.replace(BASE, custom_variant=True, tile_q=16)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host parts of one configuration's variants and of the planner."""
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        twin = gen_attention_module(CONFIG, make_variant("any", *MEMBERS)).host_twin
        assert twin is not None
        assert host_parts_build.build([twin, gen_attention_plan_module()], folder) == {}
    return folder


@pytest.fixture
def only_nvrtc(parts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(parts))
    monkeypatch.setenv("FLASHINFER_COMPILER", "nvrtc")


@pytest.mark.compiler
@pytest.mark.usefixtures("only_nvrtc")
def test_members_are_read_as_the_variant_declares_them():
    module = get_attention_module(CONFIG, make_variant("with_nvrtc", *MEMBERS))
    state = _bound_state(module)
    q, cache = torch.zeros(1, 8, 128, dtype=BF16), torch.zeros(3, 2, 4, 2, 128, dtype=BF16)
    given = (state, q, cache, None, torch.zeros_like(q), None, 1.0, 1.0, -1, None, None)
    good = [torch.zeros(8), torch.zeros(1, dtype=torch.int64), 0.5, 2]
    bad: list[tuple[int, Any, type[Exception], str]] = [
        (0, torch.zeros(8, dtype=F16), ValueError, "`bias` must have dtype float32"),
        (0, None, TypeError, "`bias`"),
        (1, torch.zeros(1, dtype=torch.int32), ValueError, "`maybe_shift` must have dtype int64"),
        (1, None, ValueError, "`bias` must be a CUDA tensor"),
        (2, "1.0", TypeError, "`head_scale`"),
        (3, 1.5, TypeError, "`steps`"),
        (3, 2, ValueError, "`bias` must be a CUDA tensor"),
    ]
    for position, value, error, message in bad:
        additional = [*good]
        additional[position] = value
        with pytest.raises(error, match=message):
            module.run(*given, *additional)


@pytest.mark.compiler
@pytest.mark.usefixtures("only_nvrtc")
def test_another_variant_has_the_same_host_part_and_kernels_of_its_own():
    other = MEMBERS[-1].replace("params", "params ")
    for source in (MEMBERS[-1], other):
        spec = gen_attention_module(CONFIG, make_variant("one", *MEMBERS[:-1], source))
        assert spec.host_key()[0] == f"variant_{CONFIG.uri}" and not spec.is_built()
        spec.build()
        assert set(spec.find().manifest["ingredients"]["toolchain"]) >= {"host part", "nvrtc"}


@pytest.mark.parametrize(
    "tensors, source, fits",
    [
        (["float"] * HOST_PART_SLOTS, "struct V : AttentionVariantBase {};", True),
        (["float"] * (HOST_PART_SLOTS + 1), "struct V : AttentionVariantBase {};", False),
        (["half"], "struct V : AttentionVariantBase {};", False),
        ([], "#include <cmath>\nstruct V : AttentionVariantBase {};", False),
        ([], "#include <cstdio>\nstruct V : AttentionVariantBase {};", True),
        ([], "struct V : AttentionVariantBase { std::array<int, 2> a; };", False),
    ],
)
def test_what_needs_a_host_compiler_is_left_to_nvcc(tensors: list[str], source: str, fits: bool):
    names = [f"t{i}" for i in range(len(tensors))]
    variant = make_variant("v", names, tensors, [], [], "V", source)
    spec = gen_attention_module(CONFIG, variant)
    assert variant.has_host_part is fits and (spec.host_twin is not None) is fits


@pytest.mark.usefixtures("only_nvrtc")
def test_a_variant_without_a_host_part_is_refused_by_name():
    variant = make_variant("v", [], [], [], [], "V", "struct V : AttentionVariantBase { std::x; };")
    spec = gen_attention_module(CONFIG, variant)
    with pytest.raises(jit.ToolchainError, match=f"{spec.name} .*no prebuilt host part"):
        spec.build()


def test_every_type_of_a_scalar_has_a_reader():
    text = (jit_env.FLASHINFER_CSRC_DIR / "nvrtc/variant/attention_variant_params.h").read_text()
    assert all(f'"{name}"' in text for name in SCALAR_TYPES)
    assert f"kSlots = {HOST_PART_SLOTS};" in text


def test_a_wheel_has_more_host_parts_than_ahead_of_time_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    names = {spec.name for spec in registry.host_specs()}
    assert names > {spec.name for spec in registry.aot_specs()}
    assert {f"variant_{CONFIG.uri}", "attention_f16_f16_f16_qk64_vo64_tile64_paged_custom"} <= names
    types = torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16
    scaled = MlaConfig("fa3", *types, 512, 64, torch.bfloat16, scaled_groups=True)
    assert scaled.uri in names
