"""``flashinfer.aot`` by FlashInfer's options: which modules they describe. Nothing is compiled."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flashinfer import aot
from flashinfer.jit import registry
from flashinfer.jit.core import JitSpec

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
NOTHING: dict[str, Any] = {
    "f16_dtype_": [],
    "f8_dtype_": [],
    "fa2_head_dim_": [],
    "fa3_head_dim_": [],
    "use_sliding_window_": [],
    "use_logits_soft_cap_": [],
}
SWITCHES = [name for name in inspect.signature(aot.gen_all_modules).parameters if "add_" in name]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")


def _names(specs: Any) -> set[str]:
    found = list(specs)
    assert all(isinstance(spec, JitSpec) for spec in found)
    return {spec.name for spec in found}


def _configs(specs: Any) -> list[Any]:
    return [spec.config for spec in specs]


def _all(capabilities: dict[str, bool], *add: str, **options: Any) -> set[str]:
    switches = {name: name.removeprefix("add_") in add for name in SWITCHES}
    found = aot.gen_all_modules(**NOTHING | options, sm_capabilities=capabilities, **switches)
    assert len({spec.name for spec in found}) == len(found)
    return _names(found)


def test_one_model() -> None:
    configs = _configs(aot.gen_fa2(BF16, E4M3, 128, 128, True, False))
    assert [(c.paged, c.mask_mode, c.tile_q) for c in configs] == [
        (False, "causal", 128),
        (True, "causal", 128),
        (False, "none", 16),
        (True, "none", 16),
    ]
    for c in configs:
        assert (c.dtype_q, c.dtype_kv, c.dtype_o, c.backend) == (BF16, E4M3, BF16, "fa2")
        assert c.sliding_window and not c.logits_soft_cap
    prefill = _configs(aot.gen_fa2(BF16, E4M3, 128, 128, True, False, prefill_only=True))
    assert prefill == configs[:2]
    hopper = _configs(aot.gen_fa3(F16, F16, BF16, 192, 128, False, True))
    assert {(c.backend, c.dtype_o, c.head_dim_qk, c.logits_soft_cap) for c in hopper} == {
        ("fa3", BF16, 192, True)
    }
    assert [c.paged for c in hopper] == [False, True]


@pytest.mark.parametrize(
    ("generate", "arguments", "name"),
    [
        (aot.gen_fa2, (torch.float32, F16, 128, 128, False, False), "q_data_type"),
        (aot.gen_fa2, (F16, F16, 100, 128, False, False), "head_dim_qk"),
        (aot.gen_fa3, (F16, F16, F16, 128, 64, False, False), "head_dim_qk`/`head_dim_vo"),
        (aot.gen_xqa, ([F16], [False], [16], [8], [1], [False], *[True] * 5), "head_dim_qk"),
    ],
)
def test_what_there_is_no_kernel_for(generate, arguments, name) -> None:
    with pytest.raises(ValueError, match=name):
        list(generate(*arguments))


def test_combinations_of_attention() -> None:
    lists = ([F16, BF16], [E4M3], [(64, 64), (128, 128)], [(128, 128)], [False, True], [False])
    portable = _configs(aot.gen_attention(*lists, False, True, True, True, False, False))
    assert {c.backend for c in portable} == {"fa2"} and len(set(portable)) == 4 * 4 * 2 * 2
    both = _configs(aot.gen_attention(*lists, True, False, False, False, False, False))
    hopper = [c for c in both if c.backend == "fa3"]
    assert {c.head_dim_qk for c in hopper} == {128} and len(set(hopper)) == 2 * 4 * 2
    gemma = _configs(aot.gen_attention([BF16], [], [], [], [], [], *[False] * 4, True, False))
    assert {(c.head_dim_vo, c.logits_soft_cap) for c in gemma} == {(256, True)}
    assert {c.sliding_window for c in gemma} == {False, True}
    oss = _configs(aot.gen_attention([], [], [], [], [], [], True, *[False] * 4, True))
    assert {(c.sinks, c.head_dim_qk, c.dtype_q) for c in oss} == {(True, 64, BF16)}
    assert {(c.backend, c.sliding_window) for c in oss} == {
        (backend, window) for backend in ("fa2", "fa3") for window in (False, True)
    }


def test_decode_by_groups() -> None:
    lists = ([BF16], [False, True], [16, 64], [128], [1, 8, 16], [False])
    found = _configs(aot.gen_xqa(*lists, True, False, False, False, False))
    assert {(c.dtype_kv, c.tile_q) for c in found} == {
        (dtype, tile) for dtype in (BF16, E4M3) for tile in (8, 16)
    }
    assert all(c.paged and c.mask_mode == "none" for c in found)
    assert not list(aot.gen_xqa(*lists, *[False] * 5))


def test_every_switch_adds_its_family_alone() -> None:
    hopper = {"sm90": True}
    plain = _all(hopper)
    kernels = {s.name for s in registry.generators()["gen_attention_module"].specs()}
    assert plain and not plain & kernels
    added = {
        name: _all(hopper, name) - plain
        for name in ("comm", "moe", "act", "misc", "gemma", "oai_oss", "xqa")
        if name != "gemma"
    }
    added["gemma"] = _all(hopper, "gemma", f16_dtype_=[BF16]) - plain
    added["xqa"] = _all(hopper, "xqa", f16_dtype_=[BF16]) - plain
    assert all(added.values())
    names = [name for found in added.values() for name in found]
    assert len(set(names)) == len(names)
    families = plain.union(*(added[name] for name in ("comm", "moe", "act", "misc")))
    assert families == _names(registry.aot_specs()) - kernels
    assert all(name.startswith("act_and_mul") for name in added["act"])


def test_targets_and_the_default_configuration() -> None:
    config = aot.get_default_config()
    parameters = list(inspect.signature(aot.gen_all_modules).parameters)
    assert [name.removesuffix("_") for name in parameters if name != "sm_capabilities"] == list(
        config
    )
    options = {f"{name}_": value for name, value in config.items() if "add_" not in name}
    everywhere = _all({"sm90": True}, "xqa", **options)
    elsewhere = _all({}, "xqa", **options)
    assert elsewhere < everywhere
    extra = everywhere - elsewhere
    assert any(name.endswith("_fa3") for name in extra)
    assert aot.get_default_config() is not config
