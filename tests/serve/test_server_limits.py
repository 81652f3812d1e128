"""What clients cannot do to a server and to each other, over real sockets."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')

from examples.serve import connections
from examples.serve.connections import fit_descriptors, spare_log
from examples.serve.limits import Limits
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_server import PATIENCE, Site, running, wait_for

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HEAD = HALF_HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
HALF_BODY = HEAD % 1000 + b'{"prompt": '


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(FakeEngine(), limits=Limits(max_stop_length=100, max_stops=2)) as site:
        yield site


@contextlib.contextmanager
def connected(site: Site, *sent: bytes) -> Iterator[list[socket.socket]]:
    """A connection for each of these beginnings of a request."""
    with contextlib.ExitStack() as stack:
        clients = []
        for data in sent:
            client = socket.create_connection(("127.0.0.1", site.port), PATIENCE)
            clients.append(stack.enter_context(client))
            client.sendall(data)
        yield clients


def received(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            data += piece
    return data


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def slow() -> None:
    time.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\uDFFFb"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "stop": ["\\udead"]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "\\ud83d": 1}',
    ],
    ids=str,
)
def test_half_of_a_surrogate_pair(site: Site, path: str, body: bytes):
    status, answer = site.ask(path, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_a_whole_surrogate_pair_is_a_character(site: Site):
    assert site.ask("/v1/completions", b'{"prompt": "\\ud83d\\ude00"}')[0] == 200
    assert bytes(site.engine.seen[-1][0]) == "😀".encode()


def test_stop_texts_have_limits(site: Site):
    for stop in ("s" * 101, ["s", "t" * 101], ["a", "b", "c"]):
        status, answer = site.ask("/v1/completions", {"prompt": "x", "stop": stop})
        assert status == 400 and answer["error"]["param"] == "stop"
        assert "at most" in answer["error"]["message"]
    assert site.ask("/v1/completions", {"prompt": "x", "stop": ["s" * 100, "t"]})[0] == 200


def test_two_names_of_one_limit_must_agree(site: Site):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    status, answer = site.ask("/v1/chat/completions", body | {"max_completion_tokens": 4})
    assert status == 400 and "max_completion_tokens" in answer["error"]["message"]
    for limits in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        status, answer = site.ask("/v1/chat/completions", body | limits)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "json"])
def test_other_content_types(site: Site, kind: str):
    head = b"Content-Type: %s\r\n" % kind.encode() if kind else b""
    body = b'{"prompt": "x"}'
    request = HALF_HEAD + head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(site, request + body) as (client,):
        status, message = error_of(received(client))
    assert status == 415 and "application/json" in message


def test_json_in_a_charset(site: Site):
    body = b'{"prompt": "x", "max_tokens": 1}'
    kind = b"Content-Type: Application/JSON; charset=utf-8\r\nConnection: close\r\n"
    request = HALF_HEAD + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connected(site, request) as (client,):
        assert received(client).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http(site: Site):
    with connected(
        site, b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 8000
    ) as clients:
        for client in clients:
            assert error_of(received(client))[0] == 400


def test_a_large_body_is_refused_before_it_is_sent(site: Site):
    with connected(site, HEAD % (3 << 20)) as (client,):
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(1 << 16)
    assert error_of(answer)[0] == 413


def test_half_requests_lock_out_nobody():
    limits = Limits(max_connections=8)
    with running(FakeEngine(), limits=limits) as site:
        halves = [HALF_HEAD, HALF_BODY, b""] * 7
        with connected(site, *halves) as clients:
            for _ in range(5):
                assert site.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
            assert len(site.uvicorn.server_state.connections) <= 8
            # Those that were closed first learn why if they had begun a request.
            for client in clients[:2]:
                assert error_of(received(client))[0] == 503
            assert received(clients[2]) == b""


def test_connections_that_are_being_answered_stay():
    engine = FakeEngine(num_pages=4096, on_step=slow)
    with running(engine, limits=Limits(max_connections=2)) as site:
        body = {"prompt": "x", "max_tokens": 100}
        busy = [site.send("/v1/completions", body) for _ in range(2)]
        wait_for(lambda: len(engine.running) == 2)
        with connected(site, b"") as (client,):
            assert error_of(received(client))[0] == 503
        for connection in busy:
            answer = json.loads(connection.getresponse().read())
            assert answer["usage"]["completion_tokens"] == 100
            connection.close()


def test_a_request_must_be_sent_in_time():
    limits = Limits(request_timeout=0.3)
    with running(FakeEngine(), limits=limits) as site:
        with connected(site, HALF_HEAD, HALF_BODY, b"") as (head, body, nothing):
            assert error_of(received(head))[0] == error_of(received(body))[0] == 408
            assert received(nothing) == b""
        wait_for(lambda: not site.uvicorn.server_state.connections)


def test_an_answer_may_take_longer_than_its_request():
    with running(FakeEngine(on_step=slow), limits=Limits(request_timeout=0.1)) as site:
        status, answer = site.ask("/v1/completions", {"prompt": "x", "max_tokens": 50})
        assert status == 200 and answer["usage"]["completion_tokens"] == 50


def test_a_client_that_does_not_read_is_left():
    engine = FakeEngine(num_pages=1 << 20)
    with running(engine, limits=Limits(read_timeout=0.3), send_buffer=4096) as site:
        body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", site.port))
            client.sendall(HEAD % len(body) + body)
            wait_for(lambda: engine.seen)
            wait_for(lambda: not site.uvicorn.server_state.connections)
            wait_for(lambda: engine.pages_free == engine.pages_total)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_end_in_protocol_when_the_server_stops(stream: bool):
    engine = FakeEngine(num_pages=1 << 16, on_step=slow)
    answers: list[bytes] = []
    with running(engine, limits=Limits(shutdown_timeout=2.0)) as site:
        bodies = [
            json.dumps({"prompt": "x", "max_tokens": n, "stream": stream}).encode()
            for n in (60, 100_000)
        ]
        requests = [HEAD % len(body) + body for body in bodies]
        with connected(site, HALF_BODY, *requests) as (half, *whole):
            wait_for(lambda: len(engine.running) == 2)
            site.uvicorn.should_exit = True
            assert error_of(received(half)) == (503, "the server is shutting down")
            answers = [received(client) for client in whole]
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", site.port), PATIENCE)
    finished, failed = answers
    assert finished.startswith(b"HTTP/1.1 200 ") and b'"length"' in finished
    assert b"the server is shutting down" in failed
    if stream:
        events = failed.partition(b"\r\n\r\n")[2].split(b"data: ")[-2:]
        assert b'"error"' in events[0] and events[1].startswith(b"[DONE]")
    else:
        assert error_of(failed)[0] == 503
    assert engine.pages_free == engine.pages_total


def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    logger = logging.Logger("flood")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    spare_log(logger)
    spare_log(logger)
    now = [100.0]
    # Not in `time` itself: an event loop that another clock sends to sleep does not wake again.
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for number in range(1000):
        logger.error("accept failed %d", number)
    logger.info("an information")  # has room of its own
    assert lines == [f"accept failed {number}" for number in range(10)] + ["an information"]
    now[0] += 61
    logger.error("accept failed, %s", "again")
    assert lines[-1] == "accept failed, again (990 lines left out)"


def test_connections_fit_the_open_files(monkeypatch: pytest.MonkeyPatch):
    limits = [64, 100]

    def change(_: int, new: tuple[int, int]) -> None:
        assert new[0] <= limits[1] == new[1]
        limits[0] = new[0]

    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(connections.resource, "setrlimit", change)
    monkeypatch.setattr(connections.os, "listdir", lambda _: ["1"] * 8)
    fitting = fit_descriptors(Limits(max_connections=1024))
    assert limits == [100, 100] and fitting.max_connections == 40
    assert fit_descriptors(Limits(max_connections=30)).max_connections == 30
    limits[:] = 64, 100_000
    assert fit_descriptors(Limits(max_connections=1024)).max_connections == 1024
    assert limits[0] == 40 + 1536


def test_limits_are_checked():
    for name in ("max_body_bytes", "request_timeout"):
        with pytest.raises(ValueError, match=name):
            Limits(**{name: 0})


def test_a_crowd_at_the_door_meets_a_limit():
    """Requests beyond the limit cost no tokenizer and harm no other."""
    engine = FakeEngine(num_pages=4096, on_step=slow)
    with running(engine, max_requests=4) as site:
        statuses: list[int] = []

        def client() -> None:
            statuses.append(site.ask("/v1/completions", {"prompt": "x", "max_tokens": 30})[0])

        threads = [threading.Thread(target=client) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert set(statuses) == {200, 503} and len(statuses) == 20
    assert len(engine.seen) == statuses.count(200)


def test_a_fault_of_the_server_is_an_error_in_json(monkeypatch: pytest.MonkeyPatch):
    def encode(_: str) -> list[int]:
        raise TypeError("a fault of the tokenizer")

    with running(FakeEngine()) as site:
        usual = site.server.encode
        monkeypatch.setattr(site.server, "encode", encode)
        status, answer = site.ask("/v1/completions", {"prompt": "x"})
        assert status == 500 and "tokenizer" in answer["error"]["message"]
        monkeypatch.setattr(site.server, "encode", usual)
        assert site.ask("/v1/completions", {"prompt": "x"})[0] == 200
        assert not site.server._answers
