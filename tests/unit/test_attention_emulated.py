"""The attention kernel, planner and launcher on the CPU: tests/emulation says how.

Each test compiles csrc/attention.cu for one configuration with the host compiler, against headers
that emulate what only a GPU has, and runs random problems against a reference in double precision.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.jit.attention.config import PACKED_FLOAT4, AttentionConfig
from flashinfer.jit.attention.variant import make_variant
from flashinfer.jit.toolchain import find_host_compiler

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "emulation"
CANNOT_RUN = 77

# Statements of the product's headers that no host compiler takes. They change in a copy of the
# file; everything else is compiled as it is.
SUBSTITUTIONS = {
    "flashinfer/common/dtype.cuh": {
        'asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));': (
            "result = emulation::half_to_float(x.bits);"
        ),
        'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low_bits) : "f"(low));': (
            "low_bits = emulation::float_to_half(low);"
        ),
        'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high_bits) : "f"(high));': (
            "high_bits = emulation::float_to_half(high);"
        ),
        'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));': (
            "bits = detail::float_to_float8<3, 7, 0x7e, 0x7f>(low) |"
            " detail::float_to_float8<3, 7, 0x7e, 0x7f>(high) << 8;"
        ),
    },
    "flashinfer/common/exp2.cuh": {
        'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = exp2f(x);",
        'asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = log2f(x);",
        'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = 1.f / x;",
    },
    "flashinfer/collective/group_max.cuh": {
        'asm("max.NaN.f32 %0, %1, %2;"\n          : "=f"(value)\n'
        '          : "f"(__uint_as_float(a)), "f"(fabsf(__uint_as_float(b))));': (
            "value = __uint_as_float(std::max(a, b & 0x7fffffffu));"
        ),
    },
    "flashinfer/attention/portable/attention.cuh": {
        "extern __shared__ __align__(128) char shared[];": "char* const shared = dynamic_shared;",
    },
}

F16, BF16 = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROPE = {"pos_encoding": "rope_llama"}
ALIBI_CAP_SINKS = {"pos_encoding": "alibi", "logits_soft_cap": True, "sinks": True}
LENGTHS = {"device_lengths": True, "sliding_window": True}
DRAFT_WINDOW = {"mask_mode": "draft", "sliding_window": True}
F16_Q = {"dtype_q": F16, "dtype_kv": PACKED_FLOAT4, "dtype_o": F16}


class Emulator:
    """Compiles and runs tests/emulation/attention_emulation.cc in a folder."""

    def __init__(self, folder: Path, rounds: int) -> None:
        """`rounds`: that many times the cases that a test asks for."""
        compiler = find_host_compiler()
        if compiler is None:
            pytest.skip("needs a host C++ compiler: none of g++, c++, clang++ in PATH")
        self.compiler = compiler.path
        self.folder = folder
        self.rounds = rounds
        self.headers = folder / "headers"  # before those of the product
        for name, statements in SUBSTITUTIONS.items():
            for statement, portable in statements.items():
                self.substitute(name, statement, portable)

    def substitute(self, name: str, statement: str, other: str) -> None:
        """Change a statement in what is compiled of a header of the product."""
        changed = self.headers / name
        text = (changed if changed.is_file() else ROOT / "include" / name).read_text()
        assert text.count(statement) == 1, f"{name}: expected once: {statement}"
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(text.replace(statement, other))

    def run(self, config: AttentionConfig, **options: Any) -> None:
        """Fail if any random case of this configuration goes wrong; options of `find_fault`."""
        if fault := self.find_fault(config, **options):
            pytest.fail(fault, pytrace=False)

    def find_fault(
        self,
        config: AttentionConfig,
        *,
        cases: int = 3,
        arch: int = 900,
        variant_headers: Path | None = None,
        huge_strides: bool = False,
    ) -> str:
        """What goes wrong in the random `cases`; empty if nothing does."""
        options = [f"-DEMULATION_ARCH={arch}", *config.define_flags]
        program = self.build("attention_emulation.cc", options, variant_headers)
        done = self.call(
            [program, "1", str(cases * self.rounds), *(["huge"] if huge_strides else [])]
        )
        if done.returncode == CANNOT_RUN:
            pytest.skip(done.stdout)
        if done.returncode == 0:
            return ""
        return f"exit status {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    def build(self, source: str, options: list[str], headers: Path | None = None) -> str:
        """The program that `source` in tests/emulation becomes; `headers`: of a variant."""
        program = str(self.folder / "program")
        includes = [self.headers, EMULATION / "include", ROOT / "include", ROOT / "csrc"]
        includes += [headers] if headers else []
        # -w: hints to nvcc are not known here. Jumps between stacks are what fortification forbids.
        options = ["-std=c++17", "-Og", "-w", "-U_FORTIFY_SOURCE", *options]
        options += [f"-I{folder}" for folder in includes]
        compiled = self.call([self.compiler, *options, str(EMULATION / source), "-o", program])
        if compiled.returncode != 0:
            pytest.fail(f"does not compile:\n{compiled.stderr[:4000]}", pytrace=False)
        return program

    @staticmethod
    def call(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=300)


def one_by_default(faults: list[Any]) -> list[Any]:
    """Faults for an emulation to find: the first shows that it finds any, the others run under
    ``--full``."""
    values = [fault if isinstance(fault, tuple) else (fault,) for fault in faults]
    return [pytest.param(*v, marks=pytest.mark.full if i else ()) for i, v in enumerate(values)]


@pytest.fixture
def emulator(tmp_path: Path, full: bool) -> Emulator:
    return Emulator(tmp_path, rounds=10 if full else 1)


# (name, head_dim_qk, head_dim_vo, tile_q, the rest of AttentionConfig); q, k, v and o are bfloat16
# unless it says otherwise.
CONFIGS = [
    ("decode", 128, 128, 16, {}),
    ("narrow", 128, 128, 8, {}),
    ("narrow-causal-16", 16, 16, 8, {"mask_mode": "causal"}),
    ("narrow-ragged-window", 48, 48, 8, {"paged": False, "sliding_window": True}),
    ("narrow-e4m3", 64, 64, 8, {"dtype_kv": E4M3}),
    ("narrow-e4m3-128", 128, 128, 8, {"dtype_kv": E4M3}),
    ("narrow-e5m2-f16", 80, 80, 8, {"dtype_q": F16, "dtype_kv": E5M2, "dtype_o": F16}),
    ("narrow-q-e4m3", 128, 128, 8, {"dtype_q": E4M3, "dtype_kv": E4M3}),
    ("decode-q-e5m2", 80, 80, 16, {"dtype_q": E5M2, "dtype_kv": E4M3, "mask_mode": "causal"}),
    ("128-q-e4m3", 64, 64, 128, {"dtype_q": E4M3, "dtype_kv": E5M2, "mask_mode": "causal"}),
    ("narrow-alibi-cap-sinks", 256, 128, 8, ALIBI_CAP_SINKS),
    ("narrow-rope", 64, 64, 8, {**ROPE, "mask_mode": "causal"}),
    ("narrow-rope-e4m3", 64, 64, 8, {**ROPE, "dtype_kv": E4M3, "mask_mode": "causal"}),
    ("decode-rope-q-e5m2", 80, 80, 16, {**ROPE, "dtype_q": E5M2, "dtype_kv": E5M2}),
    ("narrow-codes", 128, 128, 8, {"dtype_kv": E4M3, "dtype_o": E4M3}),
    ("decode-codes", 64, 128, 16, {"dtype_o": E4M3, "mask_mode": "causal"}),
    ("narrow-lengths-codes", 64, 128, 8, {"dtype_o": E4M3, "device_lengths": True}),
    ("narrow-custom", 192, 256, 8, {"mask_mode": "custom"}),
    ("decode-causal-16", 16, 16, 16, {"mask_mode": "causal"}),
    ("decode-ragged-window", 48, 48, 16, {"paged": False, "sliding_window": True}),
    ("decode-e4m3", 64, 64, 16, {"dtype_kv": E4M3}),
    ("decode-e5m2-f16", 80, 80, 16, {"dtype_q": F16, "dtype_kv": E5M2, "dtype_o": F16}),
    ("decode-alibi-cap-sinks", 128, 128, 16, ALIBI_CAP_SINKS),
    ("decode-rope", 64, 64, 16, {**ROPE, "mask_mode": "causal"}),
    ("decode-512", 512, 512, 16, {"mask_mode": "causal"}),
    ("decode-448-256", 448, 256, 16, {"mask_mode": "causal"}),
    ("decode-512-e4m3", 512, 512, 16, {"dtype_q": E4M3, "dtype_kv": E4M3, "paged": False}),
    ("decode-448", 448, 448, 16, {"paged": False}),
    ("narrow-lengths", 64, 64, 8, {"device_lengths": True}),
    ("narrow-lengths-window", 128, 64, 8, {**LENGTHS, "mask_mode": "causal"}),
    ("decode-lengths", 64, 64, 16, {"device_lengths": True, "mask_mode": "causal"}),
    ("narrow-lengths-4bit", 128, 128, 8, {"dtype_kv": PACKED_FLOAT4, "device_lengths": True}),
    ("narrow-lengths-draft", 64, 64, 8, {**LENGTHS, "mask_mode": "draft"}),
    ("decode-lengths-draft", 64, 64, 16, {"device_lengths": True, "mask_mode": "draft"}),
    ("64-draft-window-sinks", 48, 48, 64, {**DRAFT_WINDOW, "sinks": True}),
    ("narrow-512", 512, 512, 8, {"mask_mode": "causal"}),
    ("narrow-448", 448, 448, 8, {}),
    ("narrow-512-e4m3", 512, 512, 8, {"dtype_kv": E4M3, "sinks": True}),
    ("narrow-512-128-ragged", 512, 128, 8, {"paged": False, "sliding_window": True}),
    ("narrow-272-288", 272, 288, 8, {"mask_mode": "custom"}),
    ("narrow-512-rope", 512, 512, 8, ROPE),
    ("narrow-4bit-512", 512, 512, 8, {"dtype_kv": PACKED_FLOAT4, "mask_mode": "causal"}),
    ("64-f16", 64, 64, 64, {"dtype_q": F16, "dtype_kv": F16, "mask_mode": "causal"}),
    ("64-192-128-ragged", 192, 128, 64, {"paged": False, "mask_mode": "causal"}),
    ("64-256", 256, 256, 64, {"mask_mode": "causal"}),
    ("64-head-scales", 64, 64, 64, {"dtype_q": E4M3, "dtype_kv": E4M3, "head_scales": True}),
    ("narrow-cap-head-scales", 64, 64, 8, {"logits_soft_cap": True, "head_scales": True}),
    ("64-custom-rope", 48, 48, 64, {"mask_mode": "custom", "pos_encoding": "rope_llama"}),
    ("64-items-window", 32, 32, 64, {"mask_mode": "multi_item", "sliding_window": True}),
    (
        "64-e4m3-sinks-cap",
        112,
        112,
        64,
        {"dtype_kv": E4M3, "paged": False, "sinks": True, "logits_soft_cap": True},
    ),
    ("128-causal", 64, 64, 128, {"mask_mode": "causal"}),
    ("128-window", 128, 128, 128, {"mask_mode": "causal", "sliding_window": True}),
    ("128-e5m2", 80, 80, 128, {"dtype_kv": E5M2, "mask_mode": "causal"}),
    ("128-custom-ragged", 32, 32, 128, {"mask_mode": "custom", "paged": False}),
    ("128-rope-alone", 64, 64, 128, {**ROPE, "paged": False}),
    ("64-rope-e5m2", 192, 128, 64, {**ROPE, "dtype_q": F16, "dtype_kv": E5M2, "dtype_o": F16}),
    ("128-rope-e4m3", 64, 64, 128, {**ROPE, "dtype_kv": E4M3, "paged": False}),
    ("narrow-4bit", 128, 128, 8, {"dtype_kv": PACKED_FLOAT4}),
    ("narrow-4bit-f16-64", 64, 64, 8, {**F16_Q, "mask_mode": "causal", "logits_soft_cap": True}),
    ("narrow-4bit-192-256", 192, 256, 8, {**F16_Q, "paged": False}),
    ("decode-4bit", 64, 128, 16, {"dtype_kv": PACKED_FLOAT4, "mask_mode": "causal"}),
    ("decode-4bit-512", 512, 512, 16, {"dtype_kv": PACKED_FLOAT4, "mask_mode": "causal"}),
    ("64-4bit-window", 128, 128, 64, {**F16_Q, "mask_mode": "causal", "sliding_window": True}),
    ("64-4bit-256", 256, 256, 64, {"dtype_kv": PACKED_FLOAT4, "mask_mode": "custom"}),
    ("128-4bit", 128, 64, 128, {"dtype_kv": PACKED_FLOAT4, "mask_mode": "causal", "paged": False}),
]


def make_config(
    head_dim_qk: int, head_dim_vo: int, tile_q: int, fields: dict[str, object]
) -> AttentionConfig:
    types = {"dtype_q": BF16, "dtype_kv": BF16, "dtype_o": BF16}
    heads = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
    return AttentionConfig(**{**types, **heads, "tile_q": tile_q, **fields})


# What several of them have in common runs with one by default.
FULL_ONLY = {
    "decode",
    "narrow-e4m3",
    "decode-448",
    "decode-448-256",
    "128-window",
    "128-custom-ragged",
    "128-rope-alone",
    "narrow",
    "narrow-ragged-window",
    "narrow-e5m2-f16",
    "narrow-rope",
    "decode-causal-16",
    "decode-e4m3",
    "decode-alibi-cap-sinks",
    "narrow-4bit-f16-64",
    "narrow-4bit-192-256",
    "decode-4bit",
    "decode-4bit-512",
    "narrow-448",
    "decode-lengths",
    "narrow-lengths-4bit",
    "narrow-272-288",
    "narrow-512-rope",
    "decode-rope-q-e5m2",
    "128-rope-e4m3",
    "64-4bit-256",
    "128-4bit",
}
CONFIG_CASES = [
    pytest.param(c[1:], id=c[0], marks=pytest.mark.full if c[0] in FULL_ONLY else ())
    for c in CONFIGS
]


@pytest.mark.parametrize("sizes_and_fields", CONFIG_CASES)
def test_configuration(emulator: Emulator, sizes_and_fields: tuple[int, int, int, dict]):
    emulator.run(make_config(*sizes_and_fields))


BOTH_CAUSAL = {"mask_mode": "causal", "mask_mode_second": "causal"}
ALL_E4M3 = {"dtype_q": E4M3, "dtype_kv": E4M3}
CAPS = {"logits_soft_cap": True, "logits_soft_cap_second": True}
SCALED_CAP = {"mask_mode": "causal", "head_scales": True, **CAPS}
WINDOW_AND_ROPE = {"sliding_window": True, "pos_encoding_second": "rope_llama", "dtype_kv": E4M3}
ROPE_AND_CAP = {**ROPE, "logits_soft_cap_second": True, "sliding_window_second": True}
RAGGED_CUSTOM = {"mask_mode": "custom", "paged": False, "sinks": True}


@pytest.mark.parametrize(
    "tile_q, tile_q_second, fields",
    [
        pytest.param(64, 16, BOTH_CAUSAL, id="64-by_length"),
        pytest.param(128, 16, BOTH_CAUSAL, id="128-by_length", marks=pytest.mark.full),
        pytest.param(128, 16, {"mask_mode": "causal"}, id="prefill-decode"),
        pytest.param(64, 16, RAGGED_CUSTOM, id="ragged-decode", marks=pytest.mark.full),
        pytest.param(128, 16, {**ALL_E4M3, "mask_mode": "causal"}, id="e4m3-prefill-decode"),
        pytest.param(64, 64, {**ALL_E4M3, **SCALED_CAP}, id="e4m3-scaled"),
        pytest.param(128, 64, RAGGED_CUSTOM, id="ragged-prefill"),
        pytest.param(64, 16, WINDOW_AND_ROPE, id="window-rope"),
        pytest.param(128, 16, ROPE_AND_CAP, id="rope-cap", marks=pytest.mark.full),
    ],
)
def test_two_shapes(emulator: Emulator, tile_q: int, tile_q_second: int, fields: dict[str, object]):
    """Items of both kinds in one launch: requests of one group by their length, or two groups."""
    emulator.run(make_config(64, 64, tile_q, {"tile_q_second": tile_q_second, **fields}))


@pytest.mark.parametrize(
    ("name", "dtype_kv"), [("Sigmoid", BF16), ("EveryHook", BF16), ("EveryHook", E4M3)]
)
@pytest.mark.parametrize("tile_q", [16, 64])
def test_variant(
    emulator: Emulator,
    name: str,
    dtype_kv: torch.dtype,
    tile_q: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A user's variant, in the headers that a module of it is compiled from."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    file = {"Sigmoid": "sigmoid.cuh", "EveryHook": "every_hook.cuh"}[name]
    declaration = (EMULATION / "variants" / file).read_text()
    tensors = ["temperature", "extra_logits"]
    variant = make_variant(
        "emulated", tensors, ["float", "float"], ["bias"], ["float"], name, declaration
    )
    fields = {"mask_mode": "causal", "custom_variant": True, "dtype_kv": dtype_kv}
    emulator.run(make_config(64, 64, tile_q, fields), variant_headers=variant.write_headers())


@pytest.mark.parametrize(
    "tile_q, paged",
    [
        pytest.param(16, True, id="16-paged"),
        pytest.param(64, False, id="64-ragged"),
        pytest.param(16, False, id="16-ragged", marks=pytest.mark.full),
        pytest.param(64, True, id="64-paged", marks=pytest.mark.full),
    ],
)
def test_huge_strides(emulator: Emulator, tile_q: int, paged: bool):
    """Offsets beyond 32 bits in every tensor."""
    emulator.run(make_config(64, 64, tile_q, {"paged": paged}), cases=2, huge_strides=True)


@pytest.mark.parametrize("tile_q, head_dim, arch", [(64, 256, 860), (16, 512, 800)])
def test_one_stage(emulator: Emulator, tile_q: int, head_dim: int, arch: int):
    """Where shared memory is small, K and V have fewer stages."""
    config = make_config(head_dim, head_dim, tile_q, {"mask_mode": "causal"})
    emulator.run(config, cases=1, arch=arch)
