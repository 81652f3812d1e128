"""The gated delta rule and Mamba-2, emulated on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

SCAN = "flashinfer/linear_attention/chunk_scan.cuh"
TRANSFORM = "flashinfer/linear_attention/chunk_transform.cuh"
BY_CHANNEL = "flashinfer/linear_attention/chunk_channel_transform.cuh"
CHANNEL_ROWS = "flashinfer/linear_attention/chunk_channel_rows.cuh"
KEY_MAJOR = "flashinfer/linear_attention/delta_rule_key_major.cuh"
RECURRENCE = "flashinfer/linear_attention/delta_rule.cuh"
STEP = "flashinfer/linear_attention/delta_rule_step.cuh"
RANGE = "flashinfer/linear_attention/token_range.cuh"


def find_fault(emulator: Emulator, cases: int = 3, **config: str | int) -> str:
    """What the emulation says; empty if all is right.

    Without gate types: in chunks. With them and without `channel_gate`: KDA in chunks.
    """
    source = "ssd_emulation.cc" if "dstate" in config else "delta_rule_emulation.cc"
    options = [f"-DFLASHINFER_CFG_{name.upper()}={value}" for name, value in config.items()]
    if "gate_dtype" not in config:
        options.append("-DEMULATION_CHUNKS")
    elif "channel_gate" not in config:
        options.append("-DEMULATION_KDA")
    chunks = ((header, 1024) for header in (TRANSFORM, BY_CHANNEL, SCAN))
    for header, alignment in ((RECURRENCE, 128), (KEY_MAJOR, 128), *chunks):
        shared = f"extern __shared__ __align__({alignment}) char dynamic_shared[];"
        emulator.substitute(header, shared, "")  # the emulation's own has this name
    program = emulator.build(source, ["-DEMULATION_ARCH=900", *options])
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


GATES = {"gate_dtype": "float32", "beta_dtype": "float32", "bias_dtype": "float32"}


@pytest.mark.parametrize(
    ("dtype", "state", "dim"), [("bfloat16", "float32", 128), ("float16", "bfloat16", 64)]
)
def test_in_chunks(emulator: Emulator, dtype: str, state: str, dim: int) -> None:
    assert not find_fault(emulator, dtype=dtype, state_dtype=state, head_dim_k=dim)


@pytest.mark.parametrize(
    ("dtype", "state", "dim"), [("bfloat16", "float32", 128), ("float16", "bfloat16", 64)]
)
def test_kda_in_chunks(emulator: Emulator, dtype: str, state: str, dim: int) -> None:
    config = {"dtype": dtype, "state_dtype": state, "head_dim_k": dim, **GATES}
    assert not find_fault(emulator, **config)


@pytest.mark.parametrize(
    ("dtype", "state", "dt", "dim"),
    [("bfloat16", "float32", "bfloat16", 128), ("float16", "bfloat16", "float32", 64)],
)
def test_mamba_in_chunks(emulator: Emulator, dtype: str, state: str, dt: str, dim: int) -> None:
    assert not find_fault(emulator, dtype=dtype, state_dtype=state, dt_dtype=dt, dstate=dim)


@pytest.mark.parametrize(
    ("dtype", "state", "dim", "channel_gate", "key_major"),
    [
        pytest.param("bfloat16", "float32", 128, "false", "false", marks=pytest.mark.full),
        pytest.param("bfloat16", "float32", 128, "true", "false", marks=pytest.mark.full),
        ("float16", "float16", 64, "false", "false"),
        ("bfloat16", "bfloat16", 32, "true", "false"),
        ("bfloat16", "float32", 128, "false", "true"),
        pytest.param("float16", "bfloat16", 64, "true", "true", marks=pytest.mark.full),
    ],
)
def test_token_by_token(
    emulator: Emulator, dtype: str, state: str, dim: int, channel_gate: str, key_major: str
) -> None:
    config = {"dtype": dtype, "state_dtype": state, "head_dim_k": dim, "channel_gate": channel_gate}
    assert not find_fault(emulator, cases=12, **config, key_major=key_major, **GATES)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (SCAN, "ptx::cp_async_wait<0>();\n      Products", "Products"),
            (SCAN, "Products::template rows<T>(out, delta_a, in.scores);", ""),
            (TRANSFORM, "rsqrtf(sum + 1e-6f)", "1.f"),
            (SCAN, "if (!params.state.has(read_slot)) return zero_outputs();", ""),
            (RANGE, "min(end, int64_t{num_tokens})", "end"),
        ]
    ),
)
def test_faults_in_chunks_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_fault(emulator, dtype="bfloat16", state_dtype="float32", head_dim_k=64)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (CHANNEL_ROWS, "decay_over(product, warp + 1, begin + (1 << level));", ";"),
            (CHANNEL_ROWS, "keys[j][c] *= decays[i][c];", ""),
            (BY_CHANNEL, "products.compute();\n  __syncthreads();", "products.compute();"),
        ]
    ),
)
def test_faults_of_kda_in_chunks_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    config = {"dtype": "bfloat16", "state_dtype": "float32", "head_dim_k": 64, **GATES}
    assert find_fault(emulator, **config)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            (
                "if (has_part) part.store(tokens[threadIdx.x / 32], params);\n    __syncthreads();",
                ";",
            ),
            ("rsqrtf(warp_reduce_sum(kk) + 1e-6f)", "1.f"),
            ("pass + t > 0", "t > 0"),
            ("if (!params.state.has(read_slot)) return zero_outputs();", ""),
        ]
    ),
)
def test_faults_token_by_token_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(RECURRENCE, statement, other)
    config = {"dtype": "bfloat16", "state_dtype": "float32", "head_dim_k": 64}
    config |= {"channel_gate": "false", "key_major": "false"}
    assert find_fault(emulator, cases=24, **config, **GATES)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("lane() == i && row < num_rows", "lane() == i && row + 1 < num_rows"),
            ("kk = warp_reduce_sum(kk, kLanes), ", ""),
            ("kept * key_factor * sk[r]", "key_factor * sk[r]"),
            ("if (static_cast<uint64_t>(read_slot) >= params.num_slots) return false;", ""),
        ]
    ),
)
def test_faults_of_one_step_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(STEP, statement, other)
    config = {"dtype": "bfloat16", "state_dtype": "bfloat16", "head_dim_k": 64}
    config |= {"channel_gate": "false", "key_major": "false"}
    assert find_fault(emulator, cases=48, **config, **GATES)
