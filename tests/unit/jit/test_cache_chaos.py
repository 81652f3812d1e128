"""No wrong result and no repair by hand while processes are killed and the cache is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from flashinfer import env

ROOT = Path(env.__file__).parents[1]


def test_chaos(full):
    """One compile for each module, each damage and each kill at most; all answers are right."""
    seconds, processes = ("300", "64") if full else ("5", "16")
    size = ["--seconds", seconds, "--processes", processes]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("chaos.py")), *size],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ends"]["right"] and report["damages"]
    assert set(report["ends"]) <= {"right", "killed"}
    assert report["compiles"] <= report["compiles allowed"]
