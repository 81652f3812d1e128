"""Small calls of the attention kernels under compute-sanitizer.

::

    python -m tests.attention.sanitize memcheck racecheck [--shares 6] [--seconds 60]

Compiles first, then runs every case under each of the tools, dealt to some processes per tool that
run at a time, and prints what they found. A case has few rows and keys, since a tool makes a kernel
some thousand times slower, but each of the ways that data take: TMA and copies by threads, of
queries and of keys, every ring of buffers longer than it is deep, cut rows and their merge, masks,
8 bits. What begins with "decode" is the portable kernel, the rest the one for Hopper.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashinfer.jit import build_jit_specs
from flashinfer.jit.attention import gen_attention_module, hopper
from flashinfer.reference_backend import reference_backend
from tests.attention.batches import BF16, E4M3, FP16, Batch, plan_paged, plan_ragged, ragged_kv

SHORT = {"qo_lens": (70, 3), "kv_lens": (700, 129)}
LONG = {"qo_lens": (30,), "kv_lens": (5000,), "num_kv_heads": 1}  # is cut
DECODE = {"qo_lens": (1, 1, 1), "kv_lens": (700, 129, 5000)}  # cut, all of them

# name: the batch, whether it is paged, options of plan()
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "128 pages of 16": ({}, True, {"causal": True}),
    "128 pages of 1": ({"page_size": 1}, True, {"window_left": 200, "logits_soft_cap": 5.0}),
    "128 rows of 3 heads": ({"group": 3}, False, {"causal": True}),
    "128 mask": ({"qo_lens": (70,), "kv_lens": (300,)}, False, {"custom_mask": True}),
    "128 cut": (LONG, True, {}),
    "64 ragged": ({"head": (64, 64), "dtype": FP16, "qo_lens": (150, 3)}, False, {}),
    "96 pages of 128": ({"head": (96, 96), "page_size": 128}, True, {"causal": True}),
    "192/128 ragged": ({"head": (192, 128)}, False, {"causal": True}),
    "256 pages of 16": ({"head": (256, 256)}, True, {"causal": True}),
    "e4m3 128 pages of 16": ({"dtype": E4M3}, True, {"causal": True}),
    "e4m3 128 cut": ({**LONG, "dtype": E4M3}, True, {}),
    "e4m3 64 ragged": ({"head": (64, 64), "dtype": E4M3, "qo_lens": (150, 3)}, False, {}),
    "e4m3 256 pages of 3": ({"head": (256, 256), "dtype": E4M3, "page_size": 3}, True, {}),
    "128 alibi": ({}, True, {"causal": True, "pos_encoding_mode": "ALIBI"}),
    "e4m3 128 soft cap": ({"dtype": E4M3}, False, {"causal": True, "logits_soft_cap": 5.0}),
    "keys in e4m3, pages of 16": ({"kv_dtype": E4M3}, True, {"causal": True}),
    "keys in e4m3, ragged": ({"kv_dtype": E4M3, "dtype": FP16}, False, {}),
    "decode, pages of 16": (DECODE, True, {}),
    "decode, pages of 3": ({**DECODE, "page_size": 3}, True, {"window_left": 600}),
    "decode, 16 rows": ({**DECODE, "group": 8, "qo_lens": (2, 1, 2)}, True, {"causal": True}),
    "decode, ragged": ({**DECODE, "head": (64, 64), "dtype": FP16}, False, {}),
    "decode, e4m3, pages of 16": ({**DECODE, "kv_dtype": E4M3}, True, {}),
    "decode, e4m3, pages of 1": ({**DECODE, "kv_dtype": E4M3, "page_size": 1}, True, {}),
    "decode, e4m3, 16 rows": (
        {**DECODE, "kv_dtype": E4M3, "group": 8, "qo_lens": (2, 1, 2)},
        True,
        {"causal": True},
    ),
}


def served() -> list[str]:
    """Names of the cases that the kernels have."""
    names = []
    for name in CASES:
        batch = batch_of(name)
        features = hopper.KernelFeatures(
            batch.dtype, batch.stored, batch.head_dim_qk, batch.head_dim_vo
        )
        if backend_of(name) == "fa2" or hopper.missing_on_hopper(features) is None:
            names.append(name)
    return names


def backend_of(name: str) -> str:
    return "fa2" if name.startswith("decode") else "fa3"


def batch_of(name: str) -> Batch:
    fields = {**SHORT, **CASES[name][0]}
    qk, vo = fields.pop("head", (128, 128))
    if fields.get("dtype") == E4M3:
        fields["o_dtype"] = BF16
    return Batch(head_dim_qk=qk, head_dim_vo=vo, **fields)


def planned(name: str, device: torch.device) -> Any:
    batch, (_, paged, options) = batch_of(name), CASES[name]
    if options.get("custom_mask"):
        shape = (sum(q * k for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)),)
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
        options = {**options, "custom_mask": mask.to(device)}
    return (plan_paged if paged else plan_ragged)(batch, device, backend_of(name), **options)


def compile_cases(names: list[str]) -> None:
    cpu = torch.device("cpu")
    with reference_backend():
        configs = {planned(name, cpu)._executor.config for name in names}
    build_jit_specs([gen_attention_module(config) for config in configs])


def run_case(name: str) -> None:
    """Two launches, so that one begins while the one before it ends."""
    print("begun:", name, flush=True)
    device, batch = torch.device("cuda"), batch_of(name)
    q = batch.query(device)
    keys = (batch.cache(device),) if CASES[name][1] else ragged_kv(batch, device)
    wrapper = planned(name, device)
    for _ in range(2):
        out, lse = wrapper.run(q, *keys, return_lse=True)
    assert bool(out.isfinite().all()) and not bool(lse.isnan().any()), name
    print("ended:", name, flush=True)


def sanitized(tool: str, names: list[str], seconds: float) -> tuple[bool, str]:
    """Whether a tool found nothing in some cases, and its verdict."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    command += ["--kernel-regex", "kns=flashinfer", "--print-limit", "5", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.attention.sanitize"]
    command += ["--seconds", f"{0.8 * seconds:.0f}", "--cases", *names]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = b"".join(text for text in (late.stdout, late.stderr) if isinstance(text, bytes))
        lines = [f"{tool}: not done after {seconds:.0f} s: {', '.join(names)}"]
        return False, "\n".join([*lines, *said.decode(errors="replace").splitlines()[-40:]])
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    summary = next((line for line in lines if "SUMMARY" in line), "no summary")
    is_clean = done.returncode == 0 and re.search(r"SUMMARY: 0 (errors|hazards)", summary)
    took = time.monotonic() - begun
    text = f"{tool} {took:.1f} s: {summary.lstrip('= ')}: {', '.join(names)}"
    return bool(is_clean), text if is_clean else "\n".join([text, *lines[-40:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", help="such as memcheck, racecheck, synccheck")
    parser.add_argument("--shares", type=int, default=6, help="processes per tool")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one process")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--cases", nargs="+", help="run these here, without a tool")
    arguments = parser.parse_args()
    if arguments.cases:
        faulthandler.dump_traceback_later(arguments.seconds)  # says where a process waits
        for name in arguments.cases:
            run_case(name)
        faulthandler.cancel_dump_traceback_later()
        return 0
    names = [name for name in served() if arguments.only in name]
    compile_cases(names)
    shares = [share for i in range(arguments.shares) if (share := names[i :: arguments.shares])]
    jobs = [(tool, share) for tool in arguments.tools for share in shares]
    with ThreadPoolExecutor(max(len(jobs), 1)) as pool:
        verdicts = list(pool.map(lambda job: sanitized(*job, arguments.seconds), jobs))
    print("\n".join(text for _, text in verdicts))
    clean = sum(is_clean for is_clean, _ in verdicts)
    print(f"{len(names)} cases, {clean} of {len(verdicts)} processes clean")
    return 0 if clean == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
