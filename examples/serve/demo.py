"""What FlashInfer does on this machine: `make demo`, or `python -m examples.serve.demo`.

With a GPU: from an empty JIT cache to a served model of the shape of Llama 3.1 8B, a short trace,
and a decode step taken apart. Without one: the same modules compiled for SM90a and read back, and a
small model on the reference backend. Both end with a check against another implementation.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

import flashinfer
from flashinfer.jit import (
    JitSpec,
    current_compilation_context,
    nvrtc,
    toolchain,
)
from flashinfer.jit.errors import ToolchainError
from flashinfer.jit.resources import default_jobs

from . import decode_step, warmup
from .bench import replay, summarize, table
from .binaries import built_kernel_parts, kernel_table
from .check import check_greedy
from .checkpoint import LARGE, load
from .config import ModelConfig
from .engine import Engine, SamplingParams
from .model import Model
from .modules import modules
from .plot import write_plot
from .shapes import SHAPES, random_model, shape_config
from .traces import make_trace

BF16 = torch.bfloat16
HOPPER = {(9, "0a")}
PAGE_SIZE = 16
OUTPUT_TOKENS = 128
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
SPARE_BYTES = 8 << 30  # activations, graphs, workspaces


@click.command()
@click.option("--decode-step", "only_step", is_flag=True, help="Measure a decode step, no trace.")
@click.option("--batch-size", default=64, type=click.IntRange(1), help="Requests of a step.")
@click.option("--context", "contexts", nargs=2, default=(2048, 4096), help="Shortest and longest.")
@click.option("--sampled", is_flag=True, help="Decode with top-k and top-p, not greedily.")
@click.option(
    "--model-shape",
    "shape",
    default="llama-8b",
    type=click.Choice(list(SHAPES)),
    help="Whose shape the random weights have.",
)
@click.option("--fp8-kv", is_flag=True, help="Keep keys and values as float8_e4m3fn.")
@click.option("--layers", type=click.IntRange(1), help="Fewer need less memory.")
@click.option("--requests", default=48, type=click.IntRange(1), help="Requests of the trace.")
@click.option(
    "--rate",
    default=8.0,
    type=click.FloatRange(0, min_open=True),
    help="Mean requests per second of the trace.",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the decode step, as SVG.")
def main(
    only_step, batch_size, contexts, sampled, shape, fp8_kv, layers, requests, rate, path, plot
) -> None:
    """Build from an empty cache, serve, measure and check."""
    print(f"FlashInfer {flashinfer.__version__}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="flashinfer-demo-") as cache:
        # An empty cache, so that the compile times are real.
        os.environ["FLASHINFER_WORKSPACE_BASE"] = cache
        os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "WARNING")  # the demo says it itself
        if torch.cuda.is_available():
            config = shape_config(shape, layers)
            trace = None if only_step else (requests, rate)
            kv_dtype = torch.float8_e4m3fn if fp8_kv else BF16
            try:
                results = on_gpu(
                    config, trace, batch_size, contexts, sampled, shape, plot, kv_dtype
                )
            except torch.cuda.OutOfMemoryError as error:
                raise click.ClickException(
                    f"too little GPU memory, try --layers: {error}"
                ) from None
            agreement = check_greedy("cuda")
        elif only_step:
            raise click.UsageError("--decode-step needs a GPU")
        elif plot or fp8_kv or shape != "llama-8b":
            raise click.UsageError("--plot, --model-shape and --fp8-kv need a GPU")
        else:
            results = without_gpu()
            agreement = check_greedy("cpu")
    print(f"\nCheck, small random checkpoint in bfloat16: {agreement}")
    if path:
        results["check"] = vars(agreement)
        path.write_text(json.dumps(results, indent=1) + "\n")
    if not agreement.holds:
        sys.exit(1)


def on_gpu(
    config: ModelConfig,
    trace: tuple[int, float] | None,
    batch_size: int,
    contexts: tuple[int, int],
    sampled: bool = False,
    shape: str = "llama-8b",
    plot: Path | None = None,
    kv_dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    """Serve a model of random weights; `trace` has the number of requests and their rate."""
    gpu = torch.cuda.get_device_name()
    start = time.perf_counter()
    model = random_model(config, "cuda")
    decode_step.note_routes(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(
        f"{gpu}: {config.num_layers} layers of {shape}'s shape, random weights made on the GPU in "
        f"{time.perf_counter() - start:.1f} s\n"
    )
    pages = num_pages(model, batch_size, contexts, kv_dtype)
    engine, first = first_token(model, pages, batch_size, kv_dtype)
    results: dict[str, Any] = {
        "gpu": gpu, "torch": torch.__version__, "model_shape": shape, "layers": config.num_layers,
        "first_token": first,
    }  # fmt: skip
    if trace is not None:
        results["trace"] = serve_trace(engine, model, batch_size, *trace)
    step = decode_step.measure(
        engine, model, batch_size=batch_size, contexts=contexts,
        sampling=SAMPLED if sampled else decode_step.GREEDY,
    )  # fmt: skip
    step.parts = built_kernel_parts()
    print(f"\n{step}")
    if plot:
        write_plot(step, f"{shape}, {batch_size} requests, {gpu}", plot)
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(f"\nMost GPU memory in use: {memory:.1f} GB")
    return results | {"decode_step": step.as_json(), "memory_gb": memory}


def num_pages(
    model: Model, batch_size: int, contexts: tuple[int, int], kv_dtype: torch.dtype
) -> int:
    """Pages that the decode step needs, if they fit; and at least those of 32 long prompts."""
    try:
        pages = decode_step.pages_needed(batch_size, contexts, PAGE_SIZE)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    pages = max(pages, 32 * (2048 + OUTPUT_TOKENS) // PAGE_SIZE)
    page_bytes = PAGE_SIZE * decode_step.bytes_per_token(model, kv_dtype)
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    if pages * page_bytes > free:
        raise click.UsageError(
            f"{pages * page_bytes / 1e9:.0f} GB of keys and values do not fit the "
            f"{max(free, 0) / 1e9:.0f} GB that are free: lower --batch-size, --context or --layers"
        )
    return pages


def first_token(
    model: Model, pages: int, batch_size: int, kv_dtype: torch.dtype
) -> tuple[Engine, dict[str, float]]:
    """An engine, and the seconds that a user waits for its first token with nothing compiled."""
    start = time.perf_counter()
    # No tokenizer: the ids of random weights have no text.
    engine = Engine(
        model, None, num_pages=pages, page_size=PAGE_SIZE, max_batch_size=batch_size,
        kv_dtype=kv_dtype, max_batch_tokens=max(2048, 32 * batch_size), use_cuda_graph=True,
    )  # fmt: skip
    engine.build(whole=False)
    engine.add_request("first", list(range(128)), SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    compiling = engine.stats()["compile_seconds"]
    print(
        f"From an empty JIT cache to the first token: {seconds:.1f} s, of these {compiling:.1f} s "
        f"in compile ({default_jobs()} jobs)"
    )
    return engine, {"seconds": seconds, "compile_seconds": compiling}


def serve_trace(
    engine: Engine, model: Model, batch_size: int, requests: int, rate: float
) -> dict[str, float | None]:
    """Warm up, then replay arrivals with lengths like ShareGPT's and print what users see."""
    start = time.perf_counter()
    compiling = warmup.warm_up(engine, batch_size)
    print(
        f"Warm-up (loading, CUDA graphs): {time.perf_counter() - start:.1f} s, of these "
        f"{compiling:.1f} s in compile\n"
    )
    trace = make_trace("sharegpt", requests, rate=rate, output_tokens=OUTPUT_TOKENS)
    summary = summarize(replay(engine, trace, vocab_size=model.config.vocab_size))
    print(table({f"{requests} requests, {rate:g}/s": summary}))
    return {name: value if math.isfinite(value) else None for name, value in summary.items()}


def without_gpu() -> dict[str, Any]:
    """Compile what the engine needs for SM90a, and generate with a small model on the CPU."""
    # The summary below says that the reference backend computes.
    logging.getLogger("flashinfer.reference_backend").setLevel(logging.ERROR)
    if "FLASHINFER_CUDA_ARCH_LIST" not in os.environ:
        current_compilation_context.TARGET_CUDA_ARCHS = HOPPER
    specs = compilable(modules(ModelConfig.from_dict(LARGE), BF16, BF16))
    seconds = build(specs)
    print(f"\nRead back from the built libraries:\n\n{kernel_table(specs)}\n")
    generate()
    print(
        "\nNO GPU WAS USED: this machine has none that PyTorch can see. The kernels above were "
        "compiled\nbut not run; the text was computed by plain PyTorch on the CPU, through the "
        "same engine. On a\nmachine with an NVIDIA GPU `make demo` serves a model of 8 billion "
        "parameters and measures it."
    )
    return {"compile_seconds": seconds}


def build(specs: list[JitSpec]) -> dict[str, float]:
    """Compile one module after the other, saying how long each took."""
    archs = ", ".join(
        f"sm_{a}{b}" for a, b in sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    )
    name = compiler(specs)
    print(f"Compiling what a Llama in bfloat16 needs for {archs} with {name}, cache empty")
    seconds: dict[str, float] = {}
    for number, spec in enumerate(specs, 1):
        print(f"  [{number:2}/{len(specs)}] {spec.name:84}", end="", flush=True)
        start = time.perf_counter()
        spec.build()
        seconds[spec.name] = time.perf_counter() - start
        print(f"{seconds[spec.name]:5.1f} s", flush=True)
    print(f"  {sum(seconds.values()):.1f} s in all ({default_jobs()} jobs)")
    return seconds


def compilable(specs: list[JitSpec]) -> list[JitSpec]:
    """All modules; without nvcc and a host compiler those that NVRTC compiles."""
    try:
        toolchain.require_host_compiler()
        toolchain.require_toolkit()
    except ToolchainError:
        served = [spec for spec in specs if spec.host_part()]
        if not served:
            raise
        missing = len(specs) - len(served)
        print(f"Without nvcc and a host compiler {missing} of {len(specs)} modules are left out")
        return served
    return specs


def compiler(specs: list[JitSpec]) -> str:
    """Who compiles the modules; without nvcc and a host compiler it is NVRTC for all of them."""
    library = nvrtc.library()
    if library is not None and all(spec.host_part() for spec in specs):
        return f"NVRTC {toolchain.nvrtc_version(library).split()[0]}"
    return f"nvcc {'.'.join(map(str, toolchain.require_toolkit().release))}"


def generate() -> None:
    """Two prompts in one batch, greedy and sampled, on the reference backend."""
    prompts = {"greedy": "Once upon a time", "top-p 0.9, seed 1": "There was"}
    engine = Engine(*load(None, "cpu"), num_pages=64)
    for name, prompt in prompts.items():
        sampled = {"temperature": 0.0} if name == "greedy" else {"top_p": 0.9, "seed": 1}
        engine.add_request(name, prompt, SamplingParams(max_tokens=16, **sampled))
    texts = dict.fromkeys(prompts, "")
    start, tokens = time.perf_counter(), 0
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
            tokens += 1
    seconds = time.perf_counter() - start
    print(
        f"A small checkpoint of random weights, on the reference backend: {tokens} tokens in "
        f"{seconds:.1f} s.\nIts text means nothing; the check at the end says whether it is right."
    )
    for name, prompt in prompts.items():
        print(f"  {name}: {prompt!r} -> {texts[name]!r}")


if __name__ == "__main__":
    main(prog_name="python -m examples.serve.demo")
