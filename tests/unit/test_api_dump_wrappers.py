"""Dumps of the attention wrappers replay, with the objects and the options that they need.

Level 10 is read when a function is decorated: the calls are made in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.api_logging import replay_sequence
from flashinfer.reference_backend import reference_backend

ROOT = Path(__file__).resolve().parents[2]

CALLS = """
import torch
from tests.unit.test_attention_wrapper_refusals import half, ints, workspace
from tests.unit.test_attention_wrapper_runs import _RUNS
import flashinfer

for plan, (arguments, _) in _RUNS.items():
    plan().run(**arguments)

buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 20, 3)]
cache, q, sizes = half(16, 2, 1, 2, 64), half(3, 8, 64), (8, 2, 64, 1)
table = ints(0, 5, 6, 13), torch.arange(13).int(), torch.ones(3, dtype=torch.int32)
wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
flashinfer.fast_decode_plan(wrapper, *table, *sizes)
wrapper.run_return_lse(q, cache)
wrapper.forward(q, cache, window_left=2)
prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
prefill.begin_forward(torch.arange(4).int(), *table, *sizes)
prefill.forward_return_lse(q, cache, logits_soft_cap=0.5)
ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
ragged.plan(ints(0, 3), ints(0, 9), 8, 2, 64)
ragged.forward(q, half(9, 2, 64), half(9, 2, 64), causal=True)
"""


@pytest.mark.compiler
def test_dumps_of_wrappers_replay(tmp_path):
    environment = {
        **os.environ,
        "FLASHINFER_BACKEND": "reference",
        "FLASHINFER_LOGLEVEL": "10",
        "FLASHINFER_LOGDEST": str(tmp_path / "log"),
        "FLASHINFER_DUMP_DIR": str(tmp_path / "dumps"),
    }
    subprocess.run([sys.executable, "-c", CALLS], cwd=ROOT, env=environment, check=True)
    written = [path.stat().st_size for path in (tmp_path / "dumps").glob("*/inputs.*")]
    assert max(written) < 1 << 19, "the content of a workspace of 1 MiB means nothing"
    with reference_backend():
        replays = replay_sequence(str(tmp_path / "dumps"), device="cpu")
    assert [(r["api"], r["differences"]) for r in replays if not r["comparison_match"]] == []
    names = [replay["api"].rpartition(".")[2] for replay in replays]
    assert names.count("__init__") == 10 and names.count("run") == 8
    assert names.count("forward") == 2 and names.count("forward_return_lse") == 1
