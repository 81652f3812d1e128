"""The MLA kernels on the CPU, with planner and merge: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/mla/portable/mla.cuh"
LAST_MERGE = "flashinfer/mla/sm90/last_merge.cuh"
RING_KERNEL = "flashinfer/mla/sm90/ring_kernel.cuh"
FEW_ATTENTION = "flashinfer/mla/sm90/few/attention.cuh"
RING_LOADER = "flashinfer/mla/sm90/ring_loader.cuh"
NARROW_ATTENTION = "flashinfer/mla/sm90/narrow/attention.cuh"
NARROW_QUERIES = "flashinfer/mla/sm90/narrow/queries.cuh"

PAIR_MERGE = "flashinfer/mla/sm90/pair_merge.cuh"

WAIT = "ptx::mbarrier_wait_soon(address(control_.full[stage_]), phase_);"
CTA_SHARED = "dynamic_shared + ptx::cluster_rank() * emulation::cta_bytes"


def find_fault(
    emulator: Emulator, arch: int, dtype: str, dims: tuple[int, int], cases: int = 3
) -> str:
    """What the emulation says; empty if all is right."""
    shared = "extern __shared__ __align__(128) char shared[];"
    emulator.substitute(KERNEL, shared, "char* const shared = dynamic_shared;")
    return build_and_run(emulator, [f"-DEMULATION_ARCH={arch}"], (dtype,) * 4, dims, cases)


def build_and_run(
    emulator: Emulator,
    options: list[str],
    dtypes: tuple[str, str, str, str],
    dims: tuple[int, int],
    cases: int,
) -> str:
    names = ("DTYPE_Q", "DTYPE_KV", "DTYPE_KPE", "DTYPE_O", "HEAD_DIM_CKV", "HEAD_DIM_KPE")
    flags = [*zip(names, (*dtypes, *dims), strict=True), ("PROFILED", "false")]
    options = [*options, *(f"-DFLASHINFER_CFG_{name}={value}" for name, value in flags)]
    program = emulator.build("mla_emulation.cc", options)
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.mark.parametrize(
    ("arch", "dtype", "dims"),
    [
        (900, "bfloat16", (512, 64)),
        pytest.param(800, "float16", (512, 64), marks=pytest.mark.full),
        pytest.param(860, "bfloat16", (512, 64), marks=pytest.mark.full),
        pytest.param(900, "float16", (256, 0), marks=pytest.mark.full),
        (800, "bfloat16", (512, 0)),
        (860, "float16", (256, 64)),
    ],
)
def test_random_problems(emulator: Emulator, arch: int, dtype: str, dims: tuple[int, int]) -> None:
    assert not find_fault(emulator, arch, dtype, dims)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("team_sync();  // the weights are there", ""),
            ("__syncthreads();  // this tile is there, and the last one has been read", ""),
            ("team_sync();  // the first half has been read", ""),
            ("fmaxf(told(0, row), told(1, row))", "told(token_half_, row)"),
            ("told(0, row) + told(1, row)", "told(0, row)"),
            ("ptx::cp_async_wait<kAhead == 0 ? 0 : kAhead - 1>();", "ptx::cp_async_wait<1>();"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(KERNEL, statement, other)
    assert find_fault(emulator, 900, "bfloat16", (256, 64))


WIDE = "flashinfer/mla/sm90/mla.cuh"
WIDE_CONSUMER = "flashinfer/mla/sm90/consumer.cuh"
WIDE_PRODUCER = "flashinfer/mla/sm90/producer.cuh"
SCALED_WIDENER = "flashinfer/mla/sm90/scaled_widener.cuh"
PLACE_WAIT = "ptx::mbarrier_wait_soon(address(control_.kv_empty[block][part]), parity);"
E4M3 = "float8_e4m3fn"
PART_MERGE = "flashinfer/mla/sm90/part_merge.cuh"
FEW_PART_MERGE = "flashinfer/mla/sm90/few_part_merge.cuh"
MANY_PART_MERGE = "flashinfer/mla/sm90/many_part_merge.cuh"
SEEN_BY_ALL = "if ((seen / kSeen & kMask) + 1 == control_.share_count)"


def find_wide_fault(
    emulator: Emulator,
    dtypes: tuple[str, str, str],
    dims: tuple[int, int],
    *,
    cases: int = 2,
    in_pairs: bool = False,
    scaled: bool = False,
) -> str:
    """The same of the kernel for Hopper with wgmma, from queries, ckv and kpe of `dtypes`.

    A CTA is a cluster of its own, or two with the same KV rows are one.
    """
    shared = "extern __shared__ __align__(1024) char shared[];"
    emulator.substitute(WIDE, shared, f"char* const shared = {CTA_SHARED};")
    options = ["-DEMULATION_ARCH=900", "-DEMULATION_WIDE", "-D__CUDA_ARCH_FEAT_SM90_ALL"]
    options.append(f"-DFLASHINFER_CFG_SCALED_GROUPS={int(scaled)}")
    if in_pairs:
        options.append("-DEMULATION_CLUSTERS")
    output = dtypes[0] if dtypes[0] != E4M3 else "bfloat16"
    return build_and_run(emulator, options, (*dtypes, output), dims, cases)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        ("bfloat16", (512, 64)),
        pytest.param("float16", (256, 64), marks=pytest.mark.full),
        ("bfloat16", (256, 0)),
        pytest.param("float16", (512, 0), marks=pytest.mark.full),
    ],
)
def test_wide(emulator: Emulator, dtype: str, dims: tuple[int, int]) -> None:
    assert not find_wide_fault(emulator, (dtype,) * 3, dims)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        ("bfloat16", (256, 64)),
        pytest.param("bfloat16", (512, 64), marks=pytest.mark.full),
        pytest.param("bfloat16", (256, 0), marks=pytest.mark.full),
    ],
)
def test_pairs_share_rows(emulator: Emulator, dtype: str, dims: tuple[int, int]) -> None:
    assert not find_wide_fault(emulator, (dtype,) * 3, dims, cases=1, in_pairs=True)


@pytest.mark.parametrize(
    ("dtypes", "dims"),
    [
        (("bfloat16", E4M3, "bfloat16"), (256, 64)),
        pytest.param(("bfloat16", E4M3, E4M3), (512, 64), marks=pytest.mark.full),
        pytest.param((E4M3, E4M3, E4M3), (512, 0), marks=pytest.mark.full),
    ],
)
def test_widening(emulator: Emulator, dtypes: tuple[str, str, str], dims: tuple[int, int]) -> None:
    assert not find_wide_fault(emulator, dtypes, dims)


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=pytest.mark.full)])
def test_scaled_groups(emulator: Emulator, in_pairs: bool) -> None:
    dtypes = ("bfloat16", E4M3, "bfloat16")
    assert not find_wide_fault(emulator, dtypes, (512, 64), cases=1, in_pairs=in_pairs, scaled=True)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (PART_MERGE, "*counters = {0, 0};  // for the next launch", ""),
            (PART_MERGE, SEEN_BY_ALL, "if (false)"),
            (FEW_PART_MERGE, "fmaf(value, factor, sums[e]);", "sums[e] + value;"),
            (FEW_PART_MERGE, "weight * row_end.factor", "weight"),
            (FEW_PART_MERGE, "ptx::cp_async_wait<0>();", ""),
            (FEW_PART_MERGE, "write(sums[1], row + kStep * step_, has_second);", ""),
            (MANY_PART_MERGE, "fmaf(value, __uint_as_float(weight), sums[e]);", "sums[e] + value;"),
            (MANY_PART_MERGE, "store(part, load(part) * end.factor);", ""),
            (MANY_PART_MERGE, "ptx::cp_async_wait<0>();", ""),
            (PART_MERGE, "control_.share_count != 0) control_", "false) control_"),
            (WIDE_PRODUCER, "pages, first_box + box);", "pages, first_box);"),
            (WIDE_CONSUMER, "kGroup * Tile::kChunksHalf) % Tile::kChunksCkv", "kGroup * 2)"),
            (WIDE_PRODUCER, PLACE_WAIT, ""),
        ]
    ),
)
def test_faults_of_the_wide_kernel_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_wide_fault(emulator, ("bfloat16",) * 3, (256, 0), cases=24)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("item.qo_begin + static_cast<int>(token));", "item.qo_begin);"),
            ("ptx::mbarrier_wait(address(control_.q_empty), query_parity_);", ""),
            ("ptx::mbarrier_expect(full, Tile::kChunkBytes);", ""),
            ("chunk % 2) == static_cast<int>(ptx::cluster_rank())", "chunk % 2) == 0"),
        ]
    ),
)
def test_faults_of_pairs_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(WIDE_PRODUCER, statement, other)
    assert find_wide_fault(emulator, ("bfloat16",) * 3, (256, 64), cases=16, in_pairs=True)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("ptx::mbarrier_arrive_expect(full, bytes);", "ptx::mbarrier_arrive(full);"),
            ("ptx::mbarrier_wait_soon(address(control_.kv_empty[block][half]), parity);", ""),
            ("i == 0 ? first : 1 - first", "first"),
            ("bulk_copy_remote(stretch + to_other_", "bulk_copy_remote(stretch"),
        ]
    ),
)
def test_faults_of_shared_widening_are_found(
    emulator: Emulator, statement: str, other: str
) -> None:
    emulator.substitute(SCALED_WIDENER, statement, other)
    dtypes = ("bfloat16", E4M3, "bfloat16")
    assert find_wide_fault(emulator, dtypes, (512, 64), in_pairs=True, scaled=True)


def few_rows_options(emulator: Emulator, kind: str, in_pairs: bool) -> list[str]:
    """Of a kernel for few rows, whose CTAs are clusters of their own, or of two."""
    shared = "extern __shared__ __align__(1024) char shared[];"
    emulator.substitute(RING_KERNEL, shared, f"char* const shared = {CTA_SHARED};")
    options = ["-DEMULATION_ARCH=900", f"-DEMULATION_{kind}", "-D__CUDA_ARCH_FEAT_SM90_ALL"]
    return [*options, "-DEMULATION_CLUSTERS"] if in_pairs else options


def find_narrow_fault(
    emulator: Emulator,
    dtype: str,
    kpe: str,
    dims: tuple[int, int],
    cases: int = 3,
    *,
    in_pairs: bool = False,
) -> str:
    """The same of the kernel for few rows, from a latent cache of e4m3."""
    options = few_rows_options(emulator, "NARROW", in_pairs)
    dtypes = (dtype, "float8_e4m3fn", kpe, "bfloat16")
    return build_and_run(emulator, options, dtypes, dims, cases)


@pytest.mark.parametrize(
    ("dtype", "kpe", "dims"),
    [
        ("bfloat16", "float8_e4m3fn", (512, 64)),
        ("float8_e4m3fn", "bfloat16", (256, 64)),
        pytest.param("bfloat16", "bfloat16", (512, 64), marks=pytest.mark.full),
        pytest.param("float16", "float16", (512, 64), marks=pytest.mark.full),
        pytest.param("float8_e4m3fn", "float8_e4m3fn", (256, 64), marks=pytest.mark.full),
        pytest.param("bfloat16", "float8_e4m3fn", (512, 0), marks=pytest.mark.full),
        pytest.param("float16", "float8_e4m3fn", (256, 0), marks=pytest.mark.full),
    ],
)
def test_few_rows(emulator: Emulator, dtype: str, kpe: str, dims: tuple[int, int]) -> None:
    assert not find_narrow_fault(emulator, dtype, kpe, dims)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (NARROW_ATTENTION, "    parity_ ^= 1;\n  }", "  }"),
            (NARROW_ATTENTION, "multiply(output, shrink);", ""),
            (NARROW_ATTENTION, f"{WAIT}\n      if (turn_", "if (turn_"),
            (NARROW_ATTENTION, "clear_rows(item.kv_end - token);", "{}"),
            (NARROW_ATTENTION, "fmaf(sum, kUnit, product)", "product"),
            (NARROW_ATTENTION, "synchronize();  // outputs have been read", "// "),
            (NARROW_QUERIES, "* kStep;", ";"),
            (RING_LOADER, "parity_ ^ 1);", "parity_);"),
        ]
    ),
)  # fmt: skip
def test_faults_of_few_rows_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_narrow_fault(emulator, "bfloat16", "float8_e4m3fn", (256, 64))


def find_few_fault(
    emulator: Emulator,
    dtype: str,
    dims: tuple[int, int],
    cases: int = 3,
    *,
    in_pairs: bool = False,
) -> str:
    """The same of the kernel for few rows of 16 bits."""
    options = few_rows_options(emulator, "FEW", in_pairs)
    return build_and_run(emulator, options, (dtype,) * 4, dims, cases)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        ("bfloat16", (512, 64)),
        ("float16", (256, 0)),
        pytest.param("bfloat16", (256, 64), marks=pytest.mark.full),
        pytest.param("float16", (512, 0), marks=pytest.mark.full),
    ],
)
def test_few_rows_of_16_bits(emulator: Emulator, dtype: str, dims: tuple[int, int]) -> None:
    assert not find_few_fault(emulator, dtype, dims)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (FEW_ATTENTION, "store(own + tile * 512, logits[tile]);", ""),
            (FEW_ATTENTION, "parity_ ^= 1;", ""),
            (FEW_ATTENTION, "weights)) shrink(output);", "weights)) {}"),
            (FEW_ATTENTION, f"{WAIT}\n      if (turn_", "if (turn_"),
            (LAST_MERGE, "if (is_last) *counter = 0;", ""),
            (LAST_MERGE, "output[e], shrink, value * weight", "output[e], shrink, value"),
            (FEW_ATTENTION, "synchronize();  // before logits are told again", ""),
            (FEW_ATTENTION, "clear_rows(item.kv_end - token);", "{}"),
            (RING_LOADER, "parity_ ^ 1);", "parity_);"),
            (RING_LOADER, "(box + own_box) % 32", "box"),
        ]
    ),
)  # fmt: skip
def test_faults_of_few_rows_of_16_bits_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_few_fault(emulator, "bfloat16", (256, 64), cases=8)


@pytest.mark.parametrize("dims", [(256, 64), pytest.param((512, 64), marks=pytest.mark.full)])
def test_pairs_merge_few_rows(emulator: Emulator, dims: tuple[int, int]) -> None:
    assert not find_few_fault(emulator, "bfloat16", dims, in_pairs=True)


@pytest.mark.parametrize("dims", [(256, 64), pytest.param((512, 64), marks=pytest.mark.full)])
def test_pairs_merge_few_rows_of_8_bits(emulator: Emulator, dims: tuple[int, int]) -> None:
    assert not find_narrow_fault(emulator, "bfloat16", E4M3, dims, in_pairs=True)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("ptx::mbarrier_wait(barrier, 0);", ""),
            ("sum = fmaf(theirs, other[h], sum * own[h]);", "sum = sum * own[h];"),
            ("lane_idx / 4 * 8 + h * 4;", "lane_idx / 4 * 8;"),
            ("sums[h] = fmaf(sums[h], own[h], other[h]);", ""),
        ]
    ),
)
def test_faults_of_pairs_of_few_rows_are_found(
    emulator: Emulator, statement: str, other: str
) -> None:
    emulator.substitute(PAIR_MERGE, statement, other)
    assert find_few_fault(emulator, "bfloat16", (256, 64), cases=8, in_pairs=True)
