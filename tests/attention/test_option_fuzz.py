"""Each option of attention at random beside all others: 2,560 calls of each under ``--full``.

`test_attention_fuzz` draws options as they come, and with them faults. Here one option is in every
kernel of a test, on the paths and the backends that have it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from tests.attention.batches import BF16, E4M3, E5M2, FP16, need_backend
from tests.attention.calls import WRAPPERS
from tests.attention.packed import PACKED
from tests.attention.test_attention_fuzz import (
    PATHS,
    Kernel,
    draw_hopper_kernel,
    draw_kernel,
    numbers,
    run_cases,
)

FULL_MODULES, FULL_CASES = 16, 160
MODULES, CASES, CPU_CASES = 1, 15, 3
HOPPER_PATHS = ("paged", "ragged", "single_prefill", "mixed")

Change = Callable[[Kernel, random.Random], dict[str, Any]]


class Option(NamedTuple):
    """What the option changes of a kernel, the paths that have it, and whether `fa3` does."""

    change: Change
    paths: tuple[str, ...] = PATHS
    on_hopper: bool = True


def _always(**fields: Any) -> Change:
    return lambda kernel, rng: fields


def _heads(*pairs: tuple[int, int]) -> Change:
    """Heads of these sizes; of one size where a path has no other."""

    def change(kernel: Kernel, rng: random.Random) -> dict[str, Any]:
        pair = rng.choice(pairs)
        has_two = kernel.path in ("paged", "ragged", "mixed")
        return {"head_dims": pair if has_two else (pair[0], pair[0])}

    return change


def _of_16_bits(kernel: Kernel, rng: random.Random) -> dict[str, Any]:
    dtype = rng.choice([BF16, FP16])
    o_dtype = rng.choice([BF16, FP16]) if kernel.path in WRAPPERS else dtype
    return {"dtype": dtype, "kv_dtype": dtype, "o_dtype": o_dtype}


def _rope(kernel: Kernel, rng: random.Random) -> dict[str, Any]:
    types = _of_16_bits(kernel, rng)
    types["kv_dtype"] = rng.choice([types["dtype"], E4M3, E5M2])
    return {**types, "encoding": "ROPE_LLAMA"}


def _packed(kernel: Kernel, rng: random.Random) -> dict[str, Any]:
    heads = _heads((64, 64), (128, 128), (128, 128), (192, 128), (256, 256), (512, 512))
    encoding = kernel.encoding.replace("ROPE_LLAMA", "NONE")
    fields = {**_of_16_bits(kernel, rng), **heads(kernel, rng), "encoding": encoding}
    return {**fields, "kv_dtype": PACKED}


def _queries_of_8_bits(kernel: Kernel, rng: random.Random) -> dict[str, Any]:
    dtypes = {name: rng.choice([E4M3, E5M2]) for name in ("dtype", "kv_dtype")}
    return {**dtypes, "o_dtype": rng.choice([BF16, FP16])}


NOT_MIXED = tuple(path for path in PATHS if path != "mixed")
OPTIONS = {
    "soft cap": Option(_always(soft_cap=True)),
    "window": Option(_always(window=True), NOT_MIXED),
    "window and soft cap": Option(_always(window=True, soft_cap=True), NOT_MIXED),
    "rope": Option(_rope, NOT_MIXED, False),
    "alibi": Option(_always(encoding="ALIBI"), NOT_MIXED),
    "mask": Option(
        lambda kernel, rng: {"mask": rng.choice(["custom", "packed"])},
        ("paged", "ragged", "single_prefill"),
    ),
    "items": Option(_always(mask="items"), ("paged", "ragged")),
    "pages of 1": Option(_always(page_size=1), ("decode", "paged", "mixed")),
    "heads of 512": Option(_heads((512, 512), (512, 256), (512, 64)), on_hopper=False),
    "heads of 448": Option(_heads((448, 256), (448, 448)), on_hopper=False),
    "heads of 256": Option(_always(head_dims=(256, 256))),
    "4 bits": Option(_packed, ("decode", "paged", "ragged", "mixed", "single_prefill"), False),
    "8-bit queries": Option(_queries_of_8_bits, (*WRAPPERS, "mixed")),
    "sinks": Option(_always(sinks=True), ("decode", "paged")),
    "scales of heads": Option(_always(head_scales=True)),
}


# `test_attention_fuzz` draws the others by default, too.
BY_DEFAULT = ("window and soft cap", "4 bits", "8-bit queries", "heads of 448")


def draw(name: str, index: int) -> Kernel:
    """The kernel number `index` with an option; every other one is Hopper's, if that has it."""
    option, rng = OPTIONS[name], random.Random(f"{name} {index}")
    on_hopper = tuple(path for path in option.paths if path in HOPPER_PATHS)
    if option.on_hopper and index % 2:
        path = on_hopper[index // 2 % len(on_hopper)]
        kernel = draw_hopper_kernel((1000 + index) * len(HOPPER_PATHS) + HOPPER_PATHS.index(path))
    else:
        path = option.paths[index // 2 % len(option.paths)]
        kernel = draw_kernel((1000 + index) * len(PATHS) + PATHS.index(path))
    assert kernel.path == path
    return dataclasses.replace(kernel, **option.change(kernel, rng))


@pytest.mark.parametrize("index", numbers(MODULES, FULL_MODULES))
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in BY_DEFAULT else pytest.mark.full) for n in OPTIONS],
)
def test_an_option_beside_all_others(name: str, index: int, device: torch.device, full: bool):
    kernel = draw(name, index)
    need_backend(kernel.backend, device)
    examples = FULL_CASES if full else CASES
    run_cases(kernel, device, CPU_CASES if device.type == "cpu" else examples, st.none())
