"""Products with 4-bit weights: which of them stream on Hopper, and what the binding refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.gemm import _weight_kernels
from flashinfer.gemm._weight_kernels import choose_weight_config, get_weight_gemm_kernel, is_aligned
from flashinfer.jit import registry
from flashinfer.jit.weight_gemm import WeightGemmConfig, gen_weight_gemm_module

BF16, HALF, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CPU = torch.device("cpu")
SCALES = {"int8": BF16, "int4": BF16, "mxfp4": torch.uint8, "nvfp4": E4M3}


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with the SMs of an H200, and its compute capability unless the test names another."""
    known = {
        "get_shared_bytes_per_block_optin": 227 << 10,
        "get_compute_capability": getattr(request, "param", (9, 0)),
        "get_device_sm_count": 132,
    }
    for name, value in known.items():
        monkeypatch.setattr(_weight_kernels, name, lambda device, value=value: value)


def choose(
    weights: str,
    group: int,
    rows: int = 1,
    columns: int = 4096,
    k: int = 4096,
    dtype: torch.dtype = BF16,
    **more: Any,
) -> WeightGemmConfig:
    """The choice for scales that the copy engine can read, unless `more` says otherwise."""
    arguments = (CPU, dtype, dtype, weights, SCALES[weights], group, rows, columns, k)
    return choose_weight_config.__wrapped__(*arguments, **{"aligned": True, **more})


@pytest.mark.parametrize(
    ("weights", "group", "more", "streams"),
    [
        ("mxfp4", 32, {}, True),
        ("nvfp4", 16, {}, True),
        ("int4", 128, {}, True),
        ("int4", 0, {}, True),
        ("mxfp4", 32, {"columns": 128, "k": 256}, True),
        ("mxfp4", 32, {"tiles": 64, "activation": "swiglu_gate_last"}, True),
        ("mxfp4", 32, {"k": 2880}, False),
        ("mxfp4", 32, {"columns": 120}, False),
        ("mxfp4", 32, {"aligned": False}, False),
        ("mxfp4", 32, {"dtype": HALF}, False),
        ("int4", 32, {}, False),
        ("int4", 64, {}, False),
        ("int8", 0, {}, False),
        ("int8", 128, {}, False),
    ],
    ids=str,
)
def test_what_streams(
    weights: str, group: int, more: dict[str, Any], streams: bool, capability: None
) -> None:
    config = choose(weights, group, **more)
    assert config.streams == streams
    if streams:
        assert config.warps in (8, 16) and config.majors == (9,)
    else:
        assert config.columns == 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], indirect=True)
def test_other_architectures_do_not_stream(capability: None) -> None:
    assert not choose("mxfp4", 32).streams


@pytest.mark.parametrize(
    ("rows", "columns", "k", "tokens", "warps", "splits", "tile_columns"),
    [
        (1, 4096, 14336, 8, 8, 1, 32),
        (9, 4096, 4096, 16, 16, 1, 32),
        (8, 4224, 4096, 8, 8, 1, 32),  # 132 CTAs
        (8, 4232, 4096, 8, 8, 1, 64),
        (8, 16896, 4096, 8, 8, 1, 64),  # 264 CTAs
        (1, 28672, 4096, 8, 8, 1, 128),
        (1, 33800, 4096, 8, 8, 1, 0),  # more than run at once
        (16, 4224, 4096, 16, 16, 1, 32),  # 132 CTAs
        (16, 6144, 4096, 16, 8, 1, 64),
        (16, 14336, 4096, 16, 8, 1, 64),
        (16, 28672, 4096, 16, 8, 1, 128),
        (17, 4096, 14336, 16, 8, 1, 64),
        (64, 4096, 14336, 16, 8, 1, 64),
        (500, 4096, 14336, 16, 8, 1, 0),
        (1, 1024, 14336, 8, 8, 2, 32),
        (16, 2048, 6144, 16, 16, 2, 32),
        (1, 2048, 4096, 8, 8, 1, 32),  # parts of two stages
        (1, 128, 256, 8, 8, 1, 32),
    ],
)
def test_the_shape_of_streams(
    rows: int,
    columns: int,
    k: int,
    tokens: int,
    warps: int,
    splits: int,
    tile_columns: int,
    capability: None,
) -> None:
    config = choose("int4", 128, rows, columns, k)
    chosen = (config.tokens, config.warps, config.splits, config.columns)
    assert config.streams and chosen == (tokens, warps, splits, tile_columns)
    config = choose("int4", 128, rows, columns, k, tiles=3)
    chosen = (config.tokens, config.warps, config.splits, config.columns)
    assert config.streams and chosen == (tokens, 8, 1, 0), "groups have persistent CTAs"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 16}, "`columns` must be 0, 32, 64 or 128, got 16"),
        ({"columns": 32, "streams": False}, "`columns` must be 0 for gated activations and"),
        ({"columns": 32, "activation": "swiglu"}, "`columns` must be 0 for gated activations and"),
        ({"splits": 2}, "`warps` must be 8 and `splits` 1 for persistent CTAs"),
        ({"warps": 16}, "`warps` must be 8 and `splits` 1 for persistent CTAs"),
    ],
)
def test_shapes_that_no_kernel_has(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"warps": 8, "streams": True}
    with pytest.raises(ValueError, match=message):
        WeightGemmConfig(BF16, BF16, "mxfp4", torch.uint8, 32, 8, **{**good, **change})


def test_alignment_of_scales() -> None:
    scales = torch.zeros(2, 8, 32, dtype=torch.uint8)
    assert is_aligned(scales) and is_aligned(scales[:, :, :16])
    assert not is_aligned(scales[:, :, 8:])
    assert not is_aligned(torch.zeros(8, 24, dtype=torch.uint8))
    assert is_aligned(torch.zeros(1, 24, dtype=torch.uint8)), "one row has no stride"
    assert is_aligned(torch.zeros(8, 8, dtype=BF16)) and not is_aligned(
        torch.zeros(8, 4, dtype=BF16)
    )


def test_presets_have_what_hopper_takes(capability: None) -> None:
    """For the shapes of an 8B model, and of experts of 4096 by 2048."""
    names = {spec.name for spec in registry.preset_specs("gemm")}
    built = {spec.name for spec in registry.aot_specs()}
    assert names <= built
    for weights, group in (("int4", 128), ("mxfp4", 32)):
        for rows in (1, 8, 16):
            for columns, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
                assert choose(weights, group, rows, columns, k).uri in names
            first = choose(weights, group, rows, tiles=64, activation="swiglu_gate_last")
            second = choose(weights, group, rows, k=2048, tiles=64)
            assert {first.uri, second.uri} <= built


@pytest.mark.parametrize(
    ("streams", "launcher"), [(True, "weight_gemm_sm90.cu"), (False, "weight_gemm.cu")]
)
def test_the_launcher(streams: bool, launcher: str) -> None:
    config = WeightGemmConfig(BF16, BF16, "mxfp4", torch.uint8, 32, 8, 8, streams=streams)
    assert launcher in {source.name for source in gen_weight_gemm_module(config).sources}


@pytest.fixture
def grouped_call(bindings_on_the_cpu: None, capability: None) -> Any:
    """A call of the streaming kernel for two experts, with the tuple that it gets as `rows`."""
    kernel = get_weight_gemm_kernel(
        choose("mxfp4", 32, 4, 128, 256, tiles=2, activation="swiglu_gate_last")
    )

    def call(rows: object) -> None:
        out, a = torch.zeros(4, 64, dtype=BF16), torch.zeros(3, 256, dtype=BF16)
        codes = torch.zeros(2, 128, 128, dtype=torch.uint8)
        scales = torch.zeros(2, 128, 16, dtype=torch.uint8)[:, :, :8]
        kernel(2, out, a, codes, scales, None, None, rows, (1.0, 0.0, 7.0), False)

    return call


OFFSETS, INDEX = torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((OFFSETS, INDEX, True), "CUDA tensor"),  # as far as a machine without a GPU gets
        ((OFFSETS, INDEX), "`rows` must have 3 elements, got 2"),
        ((OFFSETS, INDEX, 1.5), "`starts_early` must be"),
        ((OFFSETS, None, False), r"`out` must have shape \[3, 64\]"),
        ((None, INDEX, False), "`offsets` must be"),
        ((OFFSETS[:2], INDEX, False), r"`offsets` must have shape \[3\]"),
        ((OFFSETS, INDEX.long(), False), "`row_index` must have dtype int32"),
        (OFFSETS, "`rows` must be a tuple"),
    ],
    ids=str,
)
def test_the_binding_checks_rows(rows: object, message: str, grouped_call: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        grouped_call(rows)
