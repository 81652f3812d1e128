"""The HTTP server of the serving example, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.serve.fake_engine import FakeEngine

pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')
pytest.importorskip("starlette", reason='the server needs pip install -e ".[serve]"')

from examples.serve import protocol, server
from examples.serve.limits import Limits
from examples.serve.mistakes import bind
from examples.serve.stops import StopText
from examples.serve.worker import Overloaded, Worker

PATIENCE = 20.0  # seconds before a test gives up; nothing is expected to take as long


class Site:
    """A server on a free port, and a client."""

    def __init__(self, engine: FakeEngine, max_requests: int, limits: Limits, send_buffer: int):
        self.engine = engine
        self.worker = Worker(engine, max_requests=max_requests)
        self.server = server.Server(
            self.worker, lambda text: list(text.encode()), model="fake", limits=limits
        )
        self.uvicorn = self.server.http(log_level="error", lifespan="on")
        listener = bind("127.0.0.1", 0)
        if send_buffer:  # connections have that of the socket that accepts them
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],))
        self.thread.start()
        wait_for(lambda: self.uvicorn.started)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]

    def send(self, path: str, body: object = None, method: str = "") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        return connection

    def ask(self, path: str, body: object = None, method: str = "") -> tuple[int, dict]:
        with contextlib.closing(self.send(path, body, method)) as connection:
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def stream(self, path: str, body: dict) -> list[dict]:
        with contextlib.closing(self.send(path, body | {"stream": True})) as connection:
            response = connection.getresponse()
            assert response.status == 200
            assert response.getheader("content-type", "").startswith("text/event-stream")
            events = [e.removeprefix("data: ") for e in response.read().decode().split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(e) for e in events[:-2]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "gave up"
        time.sleep(0.005)


@contextlib.contextmanager
def running(
    engine: FakeEngine,
    max_requests: int = 64,
    limits: Limits = protocol.LIMITS,
    send_buffer: int = 0,
) -> Iterator[Site]:
    site = Site(engine, max_requests, limits, send_buffer)
    try:
        yield site
    finally:
        site.uvicorn.should_exit = True
        site.thread.join(PATIENCE + 2 * limits.shutdown_timeout)  # the server's own, and its end
        if site.thread.is_alive():  # as a second Ctrl-C does, where tasks keep it
            site.uvicorn.force_exit = True
            site.thread.join(PATIENCE)
    assert not site.thread.is_alive() and not site.worker._thread.is_alive()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(FakeEngine()) as site:
        yield site
        assert site.engine.pages_free == site.engine.pages_total and not site.engine.has_work
        assert site.engine.threads <= {"engine"}, "only its own thread may touch an engine"


def slow() -> None:
    time.sleep(0.01)


def test_completion(site: Site):
    status, body = site.ask(
        "/v1/completions", {"model": "fake", "prompt": "hello", "max_tokens": 3}
    )
    assert status == 200 and body["object"] == "text_completion" and body["model"] == "fake"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("abc", "length", 0)
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert site.engine.seen[-1][0] == list(b"hello")


def test_prompt_of_token_ids_and_sampling(site: Site):
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 11}
    body = {"prompt": [3, 1, 4], "stop_token_ids": [5, 6], "ignore_eos": True, "user": None}
    assert site.ask("/v1/completions", body | sampling)[0] == 200
    prompt, params = site.engine.seen[-1]
    assert prompt == [3, 1, 4] and params.max_tokens == 16
    assert {name: getattr(params, name) for name in sampling} == sampling
    assert tuple(params.stop_token_ids) == (5, 6) and params.ignore_eos is True


def test_streamed_completion(site: Site):
    body = {"prompt": "x", "max_tokens": 4, "stream_options": {"include_usage": True}}
    *pieces, last = site.stream("/v1/completions", body)
    assert [p["choices"][0]["text"] for p in pieces] == list("abcd")
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [None] * 3 + ["length"]
    assert len({p["id"] for p in [*pieces, last]}) == 1
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5
    assert all("usage" not in p for p in pieces)


def test_stop_texts_are_left_out_and_end_the_request(site: Site):
    body = {"prompt": "x", "max_tokens": 20, "stop": ["zz", "efg", "fgh"]}
    choice = site.ask("/v1/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "stop")
    pieces = site.stream("/v1/completions", body)
    assert [p["choices"][0]["text"] for p in pieces] == ["a", "b", "c", "d", "", "", ""]
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: site.engine.pages_free == site.engine.pages_total)
    # Held back, since a stop might follow, until it is clear that none does.
    body = {"prompt": "x", "max_tokens": 4, "stop": "cdz"}
    pieces = site.stream("/v1/completions", body)
    assert [p["choices"][0]["text"] for p in pieces] == ["a", "b", "", "cd"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30])
def test_stop_texts_are_found_however_the_text_is_cut(size: int):
    text = "aab aabaac, abab"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for stop in ("aabaac", "aac", "abab", "b", "nothing", "abac"):
        filter_, shown, stopped = StopText([stop]), "", False
        for i, piece in enumerate(pieces):
            new, stopped = filter_.push(piece, last=i == len(pieces) - 1)
            shown += new
            if stopped:
                break
        assert (shown, stopped) == (text.partition(stop)[0], stop in text)


def test_chat(site: Site):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_completion_tokens": 2}
    status, answer = site.ask("/v1/chat/completions", body)
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert bytes(site.engine.seen[-1][0]) == b"system: Be kind.\nuser: Hi\nassistant:"
    pieces = site.stream("/v1/chat/completions", body)
    assert [p["choices"][0]["delta"] for p in pieces] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
    ]
    assert {p["object"] for p in pieces} == {"chat.completion.chunk"}


def test_models_health_stats(site: Site):
    assert site.ask("/v1/models")[1]["data"][0]["id"] == "fake"
    assert site.ask("/health") == (200, {"status": "ok"})
    assert site.ask("/stats")[1]["pages_total"] == 64


@pytest.mark.parametrize(
    "body, param",
    [
        (b"{", None),
        (b"[" * 100_000, None),
        (b'{"prompt": "\xff"}', None),
        ([1], None),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["two", ""]}, "prompt"),
        ({"prompt": ["two", [3]]}, "prompt"),
        ({"prompt": [[3], []]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "top_p": 1.1}, "top_p"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": ["x"] * 50, "n": 3}, "n"),
        ({"prompt": "x", "n": 2, "best_of": 3}, "best_of"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop"),
        ({"prompt": "x", "stop": list("abcde")}, "stop"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "store": True}, "store"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"prompt": "x", "response_format": {"type": "json_object"}, "ignore_eos": True},
            "response_format",
        ),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "messages": []}, "messages"),
    ],
    ids=str,
)
def test_malformed_requests(site: Site, body: object, param: str | None):
    before = len(site.engine.seen)
    status, answer = site.ask("/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param and answer["error"]["message"]
    assert param is None or param in answer["error"]["message"] or param == "prompt"
    assert len(site.engine.seen) == before, "the engine must not see it"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "function", "content": "x"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": "x", "name": 1}],
        [{"role": "user", "content": "x", "audio": {"id": "x"}}],
        [{"role": "assistant"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}],
    ],
    ids=str,
)
def test_malformed_chats(site: Site, messages: object):
    status, answer = site.ask("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_too_long_too_large_and_unknown_paths(site: Site):
    status, answer = site.ask("/v1/completions", {"prompt": "x" * 300})
    assert status == 400 and "300 tokens" in answer["error"]["message"]
    most = site.server.limits.max_body_bytes
    status, answer = site.ask("/v1/completions", {"prompt": "x" * most})
    assert status == 413 and str(most) in answer["error"]["message"]
    assert site.ask("/v1/embeddings", {})[0] == 404
    assert site.ask("/v1/completions")[0] == 405


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_pages(stream: bool):
    engine = FakeEngine(num_pages=4096, on_step=slow)
    with running(engine) as site:
        body = {"prompt": "x", "max_tokens": 10_000, "stream": stream}
        connection = site.send("/v1/completions", body)
        if stream:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            response.close()
        wait_for(lambda: engine.running)
        connection.close()
        wait_for(lambda: engine.pages_free == engine.pages_total)
        assert not engine.has_work
        assert site.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_over_capacity_harms_no_other():
    engine = FakeEngine(on_step=slow)
    with running(engine, max_requests=1) as site:
        connection = site.send("/v1/completions", {"prompt": "x", "max_tokens": 40})
        wait_for(lambda: engine.running)
        refused = site.send("/v1/completions", {"prompt": "y"})
        response = refused.getresponse()
        assert response.status == 503 and response.getheader("retry-after") == "1"
        assert "1 requests" in json.loads(response.read())["error"]["message"]
        refused.close()
        first = json.loads(connection.getresponse().read())
        connection.close()
        assert first["usage"]["completion_tokens"] == 40
        assert site.ask("/v1/completions", {"prompt": "y", "max_tokens": 1})[0] == 200


def test_a_failing_step_ends_its_requests_and_no_later_ones():
    engine = FakeEngine()
    failures = [True, True]

    def on_step() -> None:
        if failures:
            failures.pop()
            raise RuntimeError("out of luck")

    engine.on_step = on_step
    with running(engine) as site:
        status, answer = site.ask("/v1/completions", {"prompt": "x"})
        assert status == 500 and "out of luck" in answer["error"]["message"]
        (event,) = site.stream("/v1/completions", {"prompt": "x"})
        assert event["error"]["type"] == "server_error"
        assert site.ask("/v1/completions", {"prompt": "x"})[0] == 200
        assert engine.pages_free == engine.pages_total


def test_many_clients_at_once():
    engine = FakeEngine(num_pages=24, page_size=4, max_batch_size=4)
    answers: dict[int, tuple[int, dict]] = {}
    with running(engine) as site:

        def client(i: int) -> None:
            # Every fifth prompt does not fit into the cache.
            length = 200 if i % 5 == 0 else 1 + i
            body = {"prompt": "x" * length, "max_tokens": 1 + i % 26}
            answers[i] = site.ask("/v1/completions", body)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for i in range(40):
            status, body = answers[i]
            assert status == (400 if i % 5 == 0 else 200)
            if status == 200:
                assert body["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyz"[: 1 + i % 26]
        assert engine.pages_free == 24 and not engine.has_work


def test_worker_outlives_bad_listeners_and_left_callers():
    gate = threading.Event()
    engine = FakeEngine(on_step=lambda: gate.wait(PATIENCE))
    worker = Worker(engine)
    params = protocol.parse(b'{"prompt": "x", "max_tokens": 3}', chat=False).params

    def bad(_: object) -> None:
        raise RuntimeError("nobody is here")

    worker.submit("bad", [1], params, bad).result(PATIENCE)
    # The step is held up, so that this call still waits, and can be taken back.
    assert worker.submit("left", [2], params, bad).cancel()
    gate.set()
    got: list = []
    worker.submit("good", [3], params, got.append).result(PATIENCE)
    wait_for(lambda: len(got) == 3)
    assert [prompt for prompt, _ in engine.seen] == [[1], [3]]
    worker.close()


def test_worker_limits_cancels_and_closes():
    engine = FakeEngine(on_step=slow)
    worker = Worker(engine, max_requests=2)
    params = protocol.parse(b'{"prompt": "x", "max_tokens": 99}', chat=False).params
    got: list = []
    for name in ("one", "two"):
        worker.submit(name, [1], params, got.append).result(PATIENCE)
    with pytest.raises(Overloaded, match="2 requests"):
        worker.submit("three", [1], params, got.append).result(PATIENCE)
    assert worker.cancel("one").result(PATIENCE) is True
    assert worker.cancel("one").result(PATIENCE) is False
    worker.close()
    assert isinstance(got[-1], RuntimeError) and engine.pages_free == engine.pages_total
    with pytest.raises(RuntimeError, match="stopped"):
        worker.stats().result(PATIENCE)
    with pytest.raises(ValueError, match="max_requests"):
        Worker(engine, max_requests=0)
