"""A benchmark timer without a GPU, and the benchmark's modules; all of it is for import."""

import csv
import sys
from pathlib import Path

import pytest

import flashinfer

BENCHMARKS = Path(flashinfer.__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import flashinfer_benchmark as cli  # noqa: E402, F401
import harness  # noqa: E402, F401
import report  # noqa: E402, F401
import routines  # noqa: E402, F401

SMALL = ["--batch_size", "4", "--hidden_size", "64"]
_SMALL_SIZES = {
    "batch_size": 4,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 16,
    "num_heads": 16,
    "tokens_per_request": 40,
    "kv_len": 100,
    "qo_len": 20,
    "vocab_size": 4000,
    "output_size": 24,
    "num_elements": 1000,
    "segment_length": 100,
    "frames": 2,
    "side": 4,
    "s_qo": 9,
    "s_kv": 40,
    "s_prefix": 50,
    "decode_s_kv": 30,
    "block_rows": 3,
    "block_columns": 8,
    "blocks_per_row": 2,
}


def small_flags(routine) -> list[str]:
    """Flags for a small case of any routine."""
    given = [flag.name for flag in routine.flags if flag.name in _SMALL_SIZES]
    return [text for name in given for text in (f"--{name}", str(_SMALL_SIZES[name]))]


class FakeTimer:
    """Every call takes one millisecond on a device that copies 2 TB/s; nothing is executed."""

    device = "cpu"

    def __init__(self):
        self.timed = []

    def device_name(self):
        return "simulated"

    def copy_tb_per_sec(self):
        return 2.0

    def time(self, function, arguments, case):
        self.timed.append((function, arguments, case))
        return [1.0, 1.5, 0.5], "simulated"


@pytest.fixture
def timer():
    return FakeTimer()


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
