"""Replays an arrival trace on an engine and measures what its users would."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
from tabulate import tabulate

from . import warmup
from .engine import Engine, Output, SamplingParams, load
from .mistakes import check_writable, lacking, reported
from .options import kernels_option
from .traces import LENGTHS, Arrival, make_trace


@dataclass
class Timeline:
    """What happened to one request; times are seconds after the start of the trace.

    Attributes
    ----------
    arrival : float
        When the trace sent it, which is where its time to first token starts.
    prompt_tokens : int
        Length of its prompt.
    tokens : list of float
        When each of its tokens came.
    reason : str
        Why it ended: a reason of the engine, "refused: ..." or "cancelled".
    """

    arrival: float
    prompt_tokens: int
    tokens: list[float] = field(default_factory=list)
    reason: str = "unanswered"


@dataclass
class Recording:
    """A replay.

    Attributes
    ----------
    requests : list of Timeline
        In the order of the trace.
    used : list of float
        Share of the KV pages in use after each step, 0 to 1.
    seconds : float
        Time from the start to the last token.
    compile_seconds : float
        Seconds of these that went into compiling.
    pages_total, pages_free : int
        KV pages, at the end.
    """

    requests: list[Timeline]
    used: list[float]
    seconds: float
    compile_seconds: float
    pages_total: int
    pages_free: int


class _Replay:
    """One pass over a trace: who is still to come, who is being served."""

    def __init__(self, engine: Engine, trace: Sequence[Arrival], vocab_size: int, seed: int):
        self.engine = engine
        self.trace = trace
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng([seed, 100])
        self.requests = [Timeline(a.time, a.prompt_tokens) for a in trace]
        self.arrived = 0

    def send(self, now: float) -> None:
        """Hand over the requests that have arrived by `now`."""
        while self.arrived < len(self.trace) and self.trace[self.arrived].time <= now:
            arrival, index = self.trace[self.arrived], self.arrived
            self.arrived += 1
            prompt = self.rng.integers(0, self.vocab_size, size=arrival.prompt_tokens).tolist()
            # Without end-of-text, random weights generate as many tokens as the trace says.
            params = SamplingParams(
                temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True
            )
            try:
                self.engine.add_request(str(index), prompt, params)
            except ValueError as refusal:
                self.requests[index].reason = f"refused: {refusal}"
                continue
            if arrival.cancel_after == 0:
                self.cancel(index)

    def cancel(self, index: int) -> None:
        if self.engine.cancel(str(index)):
            self.requests[index].reason = "cancelled"

    def receive(self, outputs: Sequence[Output], now: float) -> None:
        for output in outputs:
            index = int(output.request_id)
            request = self.requests[index]
            if request.reason != "unanswered":
                continue  # the engine may still announce the end of what was cancelled
            if output.token_id >= 0:
                request.tokens.append(now)
            if output.finished:
                request.reason = output.reason or "finished"
            elif len(request.tokens) == self.trace[index].cancel_after:
                self.cancel(index)


def replay(
    engine: Engine,
    trace: Sequence[Arrival],
    *,
    vocab_size: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[int], None] | None = None,
) -> Recording:
    """Send the requests of a trace at their times, until all are answered, refused or cancelled.

    Parameters
    ----------
    engine : Engine
        Without work of its own.
    trace : sequence of Arrival
        In the order of time.
    vocab_size : int
        Prompts are uniformly random token ids below this.
    seed : int
        Seed of the random prompts.
    clock, sleep : callable
        Seconds of a clock, and how to wait for some.
    progress : callable, optional
        Called after each step with the number of requests that have ended.

    Returns
    -------
    Recording
        Every request with its reason.
    """
    run = _Replay(engine, trace, vocab_size, seed)
    compiled = engine.stats()["compile_seconds"]
    used: list[float] = []
    start = clock()
    while True:
        run.send(clock() - start)
        if engine.has_work:
            outputs = engine.step()
            run.receive(outputs, clock() - start)
            stats = engine.stats()
            used.append(1 - stats["pages_free"] / stats["pages_total"])
        elif run.arrived < len(trace):
            sleep(max(0.0, trace[run.arrived].time - (clock() - start)))
        else:
            break
        if progress:
            progress(sum(r.reason != "unanswered" for r in run.requests[: run.arrived]))
    stats = engine.stats()
    return Recording(
        requests=run.requests,
        used=used,
        seconds=max((t for r in run.requests for t in r.tokens), default=0.0),
        compile_seconds=stats["compile_seconds"] - compiled,
        pages_total=stats["pages_total"],
        pages_free=stats["pages_free"],
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def summarize(recording: Recording) -> dict[str, float]:
    """Numbers of a replay; NaN where nothing was measured.

    Parameters
    ----------
    recording : Recording
        Result of `replay`.

    Returns
    -------
    dict
        Counts of requests by how they ended; `ttft_*_ms` (from arrival to first token) and
        `itl_*_ms` (between a request's tokens, all gaps together) as median and 99th percentile;
        `output_tokens_per_s`, and `tokens_per_s` with the prompts of requests that got a token;
        `kv_mean` and `kv_peak`, shares of the pages in use; `compile_s`; `pages_leaked`, those that
        are not free at the end.
    """
    answered = [r for r in recording.requests if r.tokens]
    first = [1e3 * (r.tokens[0] - r.arrival) for r in answered]
    gaps = [1e3 * float(gap) for r in answered for gap in np.diff(r.tokens)]
    output = sum(len(r.tokens) for r in answered)
    prompt = sum(r.prompt_tokens for r in answered)
    reasons = [r.reason for r in recording.requests]
    refused = sum(reason.startswith("refused") for reason in reasons)
    cancelled, unanswered = reasons.count("cancelled"), reasons.count("unanswered")
    per_second = 1 / recording.seconds if recording.seconds else math.nan
    return {
        "requests": len(reasons),
        "finished": len(reasons) - refused - cancelled - unanswered,
        "cancelled": cancelled,
        "refused": refused,
        "unanswered": unanswered,
        "ttft_median_ms": _percentile(first, 50),
        "ttft_p99_ms": _percentile(first, 99),
        "itl_median_ms": _percentile(gaps, 50),
        "itl_p99_ms": _percentile(gaps, 99),
        "output_tokens_per_s": output * per_second,
        "tokens_per_s": (output + prompt) * per_second,
        "kv_mean": float(np.mean(recording.used)) if recording.used else 0.0,
        "kv_peak": max(recording.used, default=0.0),
        "seconds": recording.seconds,
        "compile_s": recording.compile_seconds,
        "pages_leaked": recording.pages_total - recording.pages_free,
    }


def table(summaries: dict[str, dict[str, float]]) -> str:
    """Summaries side by side, one column per trace."""
    names = next(iter(summaries.values()))
    rows = [[name.replace("_", " "), *(s[name] for s in summaries.values())] for name in names]
    return tabulate(rows, headers=["", *summaries], floatfmt=".4g", intfmt=",")


def write_json(path: Path, recordings: dict[str, Recording]) -> None:
    """Summary, times and reasons of every request, by trace. What was not measured is null."""
    content = {
        name: {
            "summary": {
                key: value if math.isfinite(value) else None
                for key, value in summarize(recording).items()
            },
            "requests": [vars(r) for r in recording.requests],
        }
        for name, recording in recordings.items()
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _check_format(path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('`--plot` needs matplotlib: pip install -e ".[serve]"') from (error)
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ValueError(f"`--plot` must end with one of .{', .'.join(formats)}, got {path.name!r}")


def plot(path: Path, recordings: dict[str, Recording]) -> None:
    """Distributions of TTFT and ITL, and KV use over the steps, with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    ttft, itl, use = figure.subplots(1, 3)
    for name, recording in recordings.items():
        answered = [r for r in recording.requests if r.tokens]
        first = [1e3 * (r.tokens[0] - r.arrival) for r in answered]
        gaps = [1e3 * gap for r in answered for gap in np.diff(r.tokens)]
        for axes, values in ((ttft, first), (itl, gaps)):
            share = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.step(np.sort(values), share, where="post", label=name)
        use.plot(100 * np.asarray(recording.used), label=name)
    ttft.set(xlabel="time to first token, ms", ylabel="share of requests")
    itl.set(xlabel="inter-token latency, ms", ylabel="share of gaps")
    use.set(xlabel="step", ylabel="KV pages in use, %", ylim=(0, 100))
    use.legend()
    figure.savefig(path)


@click.command()
@kernels_option
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]))
@click.option("--lengths", "kinds", multiple=True, type=click.Choice(LENGTHS), help="Default: all.")
@click.option("--requests", "count", default=64, help="Requests per trace.")
@click.option("--rate", default=math.inf, help="Mean requests per second; default: all at once.")
@click.option("--output-tokens", default=128, help="Tokens that each request generates.")
@click.option("--scale", default=1.0, help="Factor of the prompt lengths, for small models.")
@click.option("--cancel-share", default=0.0, help="Share of the clients that leave early.")
@click.option("--num-pages", default=8192, help="Pages of the KV cache.")
@click.option("--page-size", default=16, help="Tokens per page.")
@click.option("--max-batch-size", default=64, help="Requests per step.")
@click.option("--cuda-graph/--no-cuda-graph", default=None, help="Default: on a GPU.")
@click.option("--warm-up/--no-warm-up", default=None, help="Default: on a GPU.")
@click.option("--seed", default=0)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all times.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw distributions.")
def bench(
    model, device, dtype, kinds, count, rate, output_tokens, scale, cancel_share, num_pages,
    page_size, max_batch_size, cuda_graph, warm_up, seed, json_path, plot_path,
):  # fmt: skip
    """Replay arrival traces and print latencies and throughput."""
    on_gpu = device.startswith("cuda")
    with reported():
        check_writable("--json", json_path)
        check_writable("--plot", plot_path)
        if plot_path:
            _check_format(plot_path)
        loaded, tokenizer = load(model, device, getattr(torch, dtype))
        traces = {
            kind: make_trace(
                kind, count, rate=rate, output_tokens=output_tokens, scale=scale,
                cancel_share=cancel_share, seed=seed,
            )
            for kind in kinds or LENGTHS
        }  # fmt: skip
        engine = Engine(
            loaded, tokenizer, num_pages=num_pages, page_size=page_size,
            max_batch_size=max_batch_size, max_batch_tokens=max(2048, max_batch_size),
            use_cuda_graph=on_gpu if cuda_graph is None else cuda_graph,
        )  # fmt: skip
    with lacking():
        if on_gpu if warm_up is None else warm_up:
            start = time.perf_counter()
            compiled = warmup.warm_up(engine, max_batch_size)
            seconds = time.perf_counter() - start
            click.echo(f"Warm-up: {seconds:.1f} s, of these {compiled:.1f} s in compile.")
        recordings = _replay_all(engine, traces, loaded.config.vocab_size, seed)
    click.echo(table({kind: summarize(r) for kind, r in recordings.items()}))
    for kind, recording in recordings.items():
        refused = [r.reason for r in recording.requests if r.reason.startswith("refused")]
        if refused:
            click.echo(f"{kind}: {len(refused)} requests were refused, the first: {refused[0]}")
    if json_path:
        write_json(json_path, recordings)
    if plot_path:
        plot(plot_path, recordings)


def _replay_all(
    engine: Engine, traces: dict[str, list[Arrival]], vocab_size: int, seed: int
) -> dict[str, Recording]:
    from tqdm import tqdm

    recordings = {}
    for number, (kind, trace) in enumerate(traces.items()):
        with tqdm(total=len(trace), desc=kind, unit="request") as bar:

            def advance(ended: int, bar: tqdm = bar) -> None:
                bar.update(ended - bar.n)

            # Other prompts in every trace, else it would find its prefixes in the cache.
            recordings[kind] = replay(
                engine, trace, vocab_size=vocab_size,
                seed=seed * len(LENGTHS) + number, progress=advance,
            )  # fmt: skip
    return recordings
