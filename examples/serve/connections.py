"""Connections that cost the others nothing: limits of number and time, and a sparing log.

uvicorn bounds neither how many connections are open nor how long a client may take to send a
request or to read an answer. `Connection` does, and `HTTPServer` ends within a limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .answers import error_body
from .limits import Limits

_OTHER_FILES = 32  # that a running server opens beside its connections


class Connection(H11Protocol):
    """A connection of a client.

    It waits from its beginning, and from the end of each answer, until a request is there as a
    whole. If that takes too long, or if the server has no room left, it is closed; so half a
    request keeps its place only until somebody else needs it.

    Parameters
    ----------
    limits : Limits
        How many connections may be open, and for how long.
    waiting : dict
        All connections of the server that wait, the longest waiting first; shared by them.
    options
        As uvicorn passes them.
    """

    def __init__(self, limits: Limits, waiting: dict[Connection, None], **options: Any) -> None:
        super().__init__(**options)
        self._limits, self._waiting = limits, waiting
        self._deadline: asyncio.TimerHandle | None = None  # for the request to be there
        self._stalled: asyncio.TimerHandle | None = None  # for the client to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # `pause_writing` then means that the client has not taken all that was sent.
        transport.set_write_buffer_limits(high=0)
        self._wait()
        if len(self.connections) > self._limits.max_connections:
            longest = next(iter(self._waiting))
            # Where all others are being answered, it is this one, whose request is on its way.
            message = "too many connections are open, try again later"
            longest.refuse(503, message, in_any_case=longest is self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look_for_request()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()
        self._look_for_request()  # the next one may have come with this one

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def shutdown(self) -> None:
        """End a connection that has no request; an answer that is under way is its last."""
        if self.cycle is not None and not self.cycle.response_complete and self in self._waiting:
            self.refuse(503, "the server is shutting down")
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls if what a client sends is not HTTP."""
        self.refuse(400, msg)

    def refuse(self, status: int, message: str, in_any_case: bool = False) -> None:
        """Close the connection; a client that is sending a request, or any, learns why."""
        self._stop_waiting()
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if answering:
            self.transport.abort()
        elif not self.transport.is_closing():
            begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
            if begun or in_any_case:
                self._send_error(status, message)
            self.transport.close()

    def _send_error(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "overloaded_error"
        body = json.dumps(error_body(message, kind)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # the connection is past the point at which HTTP has an answer

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting[self] = None
        self._deadline = self.loop.call_later(
            self._limits.request_timeout,
            lambda: self.refuse(408, "the request was not sent in time"),
        )

    def _look_for_request(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HTTPServer(uvicorn.Server):
    """uvicorn with limits.

    Parameters
    ----------
    app : ASGI application
        The application that answers.
    limits : Limits
        Limits of connections.
    stop : callable
        Ends all answers that are under way; called shortly before the time to shut down is over.
    options
        Arguments of `uvicorn.Config`.
    """

    def __init__(self, app: Any, limits: Limits, stop: Callable[[], object], **options: Any):
        waiting: dict[Connection, None] = {}
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, limits, waiting),  # type: ignore[arg-type]
                ws="none",
                # The event loop accepts so many at a time.
                backlog=min(128, 1 + limits.max_connections // 8),
                h11_max_incomplete_event_size=limits.max_header_bytes,
                timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=limits.shutdown_timeout,  # type: ignore[arg-type]
                **options,
            )
        )
        self._limits, self._stop = limits, stop
        for name in ("asyncio", "uvicorn.error", f"{__package__}.worker"):
            spare_log(logging.getLogger(name))

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Also let more connections wait for the event loop than it accepts at a time."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(1024)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Let answers end until shortly before the limit; then fail what is left."""
        loop, limit = asyncio.get_running_loop(), self._limits.shutdown_timeout
        loop.call_later(limit - min(2.0, limit / 2), self._stop)
        loop.call_later(limit - min(1.0, limit / 4), self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def fit_descriptors(limits: Limits) -> Limits:
    """Raise the process's limit of open files for all connections, or lower their number."""
    used = len(os.listdir("/proc/self/fd")) + _OTHER_FILES
    # Half as many again are accepted before those that they replace are closed.
    wanted = used + limits.max_connections * 3 // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        fitting = max((soft - used) * 2 // 3, 1)
        limits = replace(limits, max_connections=min(limits.max_connections, fitting))
    return limits


class _SparingFilter(logging.Filter):
    """Lets some lines of each level pass in a while, and says how many it left out."""

    LINES, SECONDS = 10, 60.0

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[int, tuple[float, int]] = {}  # level: begin, lines

    def filter(self, record: logging.LogRecord) -> bool:
        begin, lines = self._windows.get(record.levelno, (-self.SECONDS, 0))
        now = time.monotonic()
        if now - begin < self.SECONDS:
            self._windows[record.levelno] = begin, lines + 1
            return lines < self.LINES
        if lines > self.LINES:
            text = record.getMessage()
            record.msg, record.args = "%s (%d lines left out)", (text, lines - self.LINES)
        self._windows[record.levelno] = now, 1
        return True


def spare_log(logger: logging.Logger) -> None:
    """Bound what a logger writes, so that no client can fill a disk; once for each logger."""
    if not any(isinstance(known, _SparingFilter) for known in logger.filters):
        logger.addFilter(_SparingFilter())
