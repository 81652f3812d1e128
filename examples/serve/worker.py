"""The one thread that touches an engine, and how the threads of a server talk to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .engine import Engine, Output, SamplingParams

logger = logging.getLogger(__name__)


class Overloaded(RuntimeError):
    """As many requests as are allowed are being served or wait."""

    @classmethod
    def of(cls, max_requests: int) -> Overloaded:
        """With the message for clients."""
        return cls(f"{max_requests} requests are being served; try again later")


class Worker:
    """Runs an engine in a thread of its own.

    Calls come from any thread and are carried out between two steps, so that the engine itself
    needs no lock and its CUDA work comes from one thread.

    Parameters
    ----------
    engine : Engine
        This thread alone uses it from now on.
    max_requests : int
        Requests that may be served or wait at a time, at least 1.
    """

    def __init__(self, engine: Engine, *, max_requests: int = 256):
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {max_requests}")
        self.max_requests = max_requests
        self._engine = engine
        self._wake = threading.Condition()
        self._calls: deque[tuple[Callable[[], object], Future]] = deque()
        self._listeners: dict[str, Callable[[Output | Exception], None]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        listener: Callable[[Output | Exception], None],
    ) -> Future[None]:
        """Add a request.

        Parameters
        ----------
        request_id : str
            Unique among the requests being served.
        prompt : list of int
            Token ids.
        params : SamplingParams
            How to sample.
        listener : callable
            Gets each `Output` of the request, or an exception that ended it, in the engine's
            thread. It must not block.

        Returns
        -------
        Future
            Done when the engine has accepted; else with the engine's `ValueError`, or `Overloaded`.
        """

        def add() -> None:
            if len(self._listeners) >= self.max_requests:
                raise Overloaded.of(self.max_requests)
            self._engine.add_request(request_id, prompt, params)
            self._listeners[request_id] = listener

        return self._call(add)

    def cancel(self, request_id: str) -> Future[bool]:
        """End a request and free its pages; the result tells if it was being served."""

        def drop() -> bool:
            return self._listeners.pop(request_id, None) is not None and self._engine.cancel(
                request_id
            )

        return self._call(drop)

    def stats(self) -> Future[dict]:
        """Result of `Engine.stats` between two steps."""
        return self._call(self._engine.stats)

    def close(self, timeout: float | None = None) -> None:
        """End the thread after its step, and with it every request; wait so many seconds for it."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _call(self, function: Callable[[], object]) -> Future:
        future: Future = Future()
        with self._wake:
            if self._closed:
                future.set_exception(RuntimeError("the engine has been stopped"))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def _work(self) -> None:
        while True:
            with self._wake:
                # A request whose step failed may leave work that nobody waits for: sleep then too.
                self._wake.wait_for(
                    lambda: (
                        self._calls or self._closed or (self._listeners and self._engine.has_work)
                    )
                )
                closed = self._closed
                calls, self._calls = self._calls, deque()
            for function, future in calls:
                if not future.set_running_or_notify_cancel():
                    continue  # whoever called has left
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            if closed:
                self._fail(RuntimeError("the engine has been stopped"))
                return
            if self._listeners and self._engine.has_work:
                self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            logger.exception("a step failed; %d requests end", len(self._listeners))
            self._fail(error)
            return
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if output.finished:
                self._listeners.pop(output.request_id, None)
            if listener:
                self._tell(listener, output)

    def _fail(self, error: Exception) -> None:
        """End all requests: nobody knows which of them a failed step belongs to."""
        listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            try:
                self._engine.cancel(request_id)
            except Exception:
                logger.exception("cannot cancel %s", request_id)
            self._tell(listener, error)

    @staticmethod
    def _tell(listener: Callable[[Output | Exception], None], what: Output | Exception) -> None:
        try:
            listener(what)
        except Exception:  # such as a closed event loop: no reason to stop serving the others
            logger.exception("a listener failed")
