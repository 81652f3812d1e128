"""Server and benchmark of the serving example on its small model, by the reference backend."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')
pytest.importorskip("starlette", reason='the server needs pip install -e ".[serve]"')

from examples.serve import bench
from examples.serve.engine import Engine, SamplingParams, load
from tests.serve.test_server import PATIENCE, running

PROMPTS = ["The quick brown fox", "Hé", "jumps over the lazy dog " * 3, "x"]


def alone(engine: Engine, prompt: str) -> str:
    engine.add_request("one", prompt, SamplingParams(temperature=0.0, max_tokens=6))
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    return text


def test_clients_get_what_the_engine_generates():
    model, tokenizer = load(None, "cpu", torch.bfloat16)

    def engine() -> Engine:
        # One at a time: a product of other rows rounds otherwise, and greedy choices may tie.
        return Engine(model, tokenizer, num_pages=64, max_batch_size=1)

    expected = [alone(engine(), prompt) for prompt in PROMPTS]
    served = engine()
    answers: dict[int, str] = {}
    with running(served) as site:

        def client(i: int) -> None:
            body = {"prompt": PROMPTS[i], "max_tokens": 6, "temperature": 0}
            if i % 2:
                pieces = site.stream("/v1/completions", body)
                answers[i] = "".join(p["choices"][0]["text"] for p in pieces)
            else:
                answers[i] = site.ask("/v1/completions", body)[1]["choices"][0]["text"]

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for body in ({"prompt": [999]}, {"prompt": "x", "max_tokens": 2000}):
            status, answer = site.ask("/v1/completions", body)
            assert status == 400 and answer["error"]["message"]
        for thread in threads:
            thread.join(PATIENCE)
        status, answer = site.ask(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "seed": 1, "max_tokens": 4},
        )
        assert status == 200 and answer["usage"]["completion_tokens"] <= 4
        stats = site.ask("/stats")[1]
        assert stats["pages_free"] == stats["pages_total"] == 64
    assert [answers[i] for i in range(len(PROMPTS))] == expected


def test_bench_command(tmp_path):
    arguments = (
        "--device cpu --requests 6 --scale 0.02 --output-tokens 4 --num-pages 64 --rate 50 "
        "--lengths constant --lengths uniform --cancel-share 0.3 --warm-up --max-batch-size 4"
    )
    result = CliRunner().invoke(
        bench.bench, [*arguments.split(), "--json", str(tmp_path / "times.json")]
    )
    assert result.exit_code == 0, result.output
    assert "itl p99 ms" in result.output and "Warm-up: " in result.output
    content = json.loads((tmp_path / "times.json").read_text())
    assert list(content) == ["constant", "uniform"]
    for recording in content.values():
        summary = recording["summary"]
        assert summary["pages_leaked"] == summary["unanswered"] == summary["refused"] == 0
        assert summary["finished"] + summary["cancelled"] == 6 and summary["compile_s"] >= 0
        reasons = {r["reason"]: len(r["tokens"]) for r in recording["requests"]}
        assert reasons["length"] == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rate", "0"], "rate must be above 0"),
        (["--num-pages", "0"], "num_pages"),
        (["--model", "/nowhere"], "nowhere"),
    ],
)
def test_bench_command_refuses(arguments: list[str], message: str):
    result = CliRunner().invoke(bench.bench, ["--device", "cpu", *arguments])
    assert result.exit_code == 2 and message in result.output
