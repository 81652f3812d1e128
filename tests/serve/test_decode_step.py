"""The measurement of a decode step: what is counted, and how time is divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.serve import decode_step
from examples.serve.binaries import kernel_parts
from examples.serve.checkpoint import SMALL, load, random_tensors, write_random_checkpoint
from examples.serve.config import ModelConfig
from examples.serve.decode_step import ATTENTION, GAPS, GEMM, HOST, LAYER, OTHER, SAMPLING, Span
from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.modules import modules

PARTS = {"attention_kernel": ATTENTION, "norm_kernel": LAYER, "top_k_kernel": SAMPLING}
TINY = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}


def test_parts_of_kernels():
    names = {
        "void flashinfer::attention_kernel<flashinfer::AttentionTraits<X>>(Params)": ATTENTION,
        "void flashinfer::norm_kernel<4>(flashinfer::NormParams)": LAYER,
        "void flashinfer::unknown_kernel<4>(Params)": OTHER,
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": GEMM,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64": GEMM,
        "void cublasLt::splitKreduce_kernel<32, 16, int>": GEMM,
        "void at::native::norm_kernel(int)": OTHER,
        "Memcpy HtoD (Pageable -> Device)": OTHER,
    }
    assert {name: decode_step.part_of(name, PARTS) for name in names} == names


def test_what_overlaps_counts_once_and_pauses_are_the_hosts():
    spans = [
        Span("nvjet", 110.0, 130.0),  # gap of 10
        Span("void flashinfer::norm_kernel<1>()", 0.0, 60.0),
        Span("void flashinfer::attention_kernel<1>()", 40.0, 100.0),  # begins before the norm ends
        Span("Memset", 41.0, 50.0),  # within the norm
        Span("nvjet", 500.0, 510.0),  # after a pause of the host
    ]
    times = decode_step.busy_time(spans, PARTS)
    spent = {part: us for part, us in times.items() if us}
    assert spent == {ATTENTION: 40, GEMM: 30, LAYER: 60, GAPS: 10}
    assert sum(decode_step.busy_time([], PARTS).values()) == 0


def test_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10.5, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "b", "ts": 11, "dur": 0.25},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 9},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1},
    ]
    spans = decode_step.read_trace(json.dumps({"traceEvents": events}))
    assert spans == [Span("a", 10.5, 12.5), Span("b", 11.0, 11.25)]


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step(tied: bool):
    """Every weight but the embedding's rows, unless they are the head too."""
    config = ModelConfig.from_dict({**TINY, "tie_word_embeddings": tied})
    tensors = random_tensors(config)
    every = sum(tensor.nbytes for tensor in tensors.values())
    table = tensors["model.embed_tokens.weight"].nbytes
    model = Model(config, tensors, "cpu", torch.bfloat16)
    assert decode_step.weight_bytes(model) == every - (0 if tied else table)
    assert decode_step.bytes_per_token(model, torch.bfloat16) == 2 * 2 * 2 * 16 * 2


def test_products_are_those_of_cublaslt():
    """Where the example is imported before PyTorch, as by `python -m`, unless the user says no."""
    code = "import examples.serve, torch; print(torch.backends.cuda.preferred_blas_library())"
    for choice, expected in (({}, True), ({"TORCH_BLAS_PREFER_CUBLASLT": "0"}, False)):
        env = {**os.environ, **choice}
        if not choice:
            env.pop("TORCH_BLAS_PREFER_CUBLASLT", None)
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        assert out.strip().endswith(".Cublaslt") == expected, out


def test_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_step, "STEPS", 4)
    model, _ = load(write_random_checkpoint(tmp_path, TINY), "cpu")
    needed = decode_step.pages_needed(3, (20, 120), 16)
    assert needed == -(-276 // 16) + -(-294 // 16) + -(-312 // 16)  # prompts of 20, 38 and 56
    engine = Engine(model, None, num_pages=needed, max_batch_size=3, max_batch_tokens=30)

    def record(run):
        run()
        return [Span("nvjet", 0.0, 50.0), Span("void flashinfer::norm_kernel()", 50.0, 60.0)]

    options = {"batch_size": 3, "contexts": (20, 120), "record": record}
    step = decode_step.measure(engine, model, PARTS, **options)
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"] and not engine.has_work
    assert len(step.milliseconds) == 4
    # Half of the steps, after those that settle and those in which other prompts were read.
    low, middle, high = step.contexts
    assert low >= 20 + 1 + 5 + 2 and low < middle < high <= 56 + 10
    assert step.kv_bytes == sum(step.contexts) * 2 * 2 * 2 * 16 * 2
    assert step.floor_ms == pytest.approx((step.weight_bytes + step.kv_bytes) / 4.3e9)
    shares = step.shares()
    assert shares[GEMM] == pytest.approx(0.010) and shares[LAYER] == pytest.approx(0.002)
    assert sum(shares.values()) == pytest.approx(step.step_ms) and shares[HOST] > 0
    for text in ("3 requests", "matrix products", "host (the GPU waits)", "floor ms"):
        assert text in str(step)
    content = json.loads(json.dumps(step.as_json()))
    assert content["ratio"] == pytest.approx(step.step_ms / step.floor_ms)
    assert [kernel["part"] for kernel in content["kernels"]] == [GEMM, LAYER]
    step.spans.clear()
    assert "No shares" in str(step)
    with pytest.raises(ValueError, match=f"must have {needed + 1} free pages, got {needed}"):
        decode_step.measure(engine, model, PARTS, **{**options, "contexts": (20, 140)})
    with pytest.raises(ValueError, match="`contexts` must be two lengths"):
        decode_step.measure(engine, model, PARTS, **{**options, "contexts": (100, 120)})


@pytest.mark.gpu
def test_on_a_gpu():
    model, _ = load(None, "cuda")
    engine = Engine(model, None, num_pages=256, max_batch_size=4, use_cuda_graph=True)
    engine.build()
    parts = kernel_parts(modules(model.config, model.dtype, model.dtype))
    sampling = SamplingParams(top_k=50, top_p=0.9, seed=0)
    options = {"batch_size": 4, "contexts": (200, 600), "sampling": sampling}
    step = decode_step.measure(engine, model, parts, **options)
    shares = step.shares()
    assert all(shares[part] > 0 for part in (ATTENTION, GEMM, LAYER, SAMPLING))
    ours = [kernel for kernel in step.as_json()["kernels"] if "flashinfer::" in kernel["name"]]
    assert ours and all(kernel["part"] != OTHER for kernel in ours)
