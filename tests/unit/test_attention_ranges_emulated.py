"""Ranges that are seen in both directions, in the attention kernel on the CPU (tests/emulation).

The variant is the one that is shipped, in the headers that its modules are compiled from; the
reference in double precision states its mask again, per pair of query and key.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashinfer.jit.attention.config import AttentionConfig
from flashinfer.jit.attention.ranges import ranges_jit_args
from flashinfer.jit.attention.variant import make_variant
from tests.unit.test_attention_emulated import Emulator

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("tile_q", "cases", "spoilt"),
    [
        (8, 4, False),
        pytest.param(16, 4, False, marks=pytest.mark.full),
        (64, 4, False),
        (128, 3, False),
        (64, 4, True),
    ],
    ids=["8", "16", "64", "128", "spoilt"],
)
def test_random_ranges(
    tile_q: int,
    cases: int,
    spoilt: bool,
    full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode and prefill, as a suffix of the keys; a mask that forgets a window is found out."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    arguments = ranges_jit_args(BF16, BF16, BF16, 64, 64)
    if spoilt:
        declaration = arguments[-1]
        arguments[-1] = declaration.replace("distance <= params.range_window_left", "true")
        assert arguments[-1] != declaration
    headers = make_variant(arguments[0], *arguments[7:]).write_headers()
    config = AttentionConfig(BF16, BF16, BF16, 64, 64, tile_q, custom_variant=True)
    emulator = Emulator(tmp_path, rounds=1)
    options = ["-DEMULATION_ARCH=900", "-DEMULATION_RANGES=1", *config.define_flags]
    program = emulator.build("attention_emulation.cc", options, headers)
    done = emulator.call([program, "1", str(cases * (10 if full else 1))])
    assert (done.returncode == 1) == spoilt, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert ("WRONG" in done.stdout) == spoilt
