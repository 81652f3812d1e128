"""An HTTP server with OpenAI's completion endpoints in front of an engine.

`/v1/completions` and `/v1/chat/completions`, whole or streamed, `/v1/models`, `/health` and
`/stats`. The event loop parses and writes; the engine runs in a thread (`Worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import click
import torch

from . import warmup
from .answers import Answer, error_body
from .chat import load_chat, plain_chat
from .engine import Engine, Output, load
from .mistakes import bind, reported
from .protocol import BadRequest, Request, StopText, parse
from .worker import Overloaded, Worker

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise ImportError('the server needs pip install -e ".[serve]"') from error

MAX_BODY = 4 << 20  # bytes


class Server:
    """Handlers of the endpoints.

    Parameters
    ----------
    worker : Worker
        Runs the engine.
    encode : callable
        Text to token ids.
    chat : callable, optional
        Messages (dicts with "role" and "content") to token ids; default: `plain_chat`, encoded.
    model : str
        Name to answer with.
    """

    def __init__(
        self,
        worker: Worker,
        encode: Callable[[str], list[int]],
        chat: Callable[[list[dict]], list[int]] | None = None,
        model: str = "model",
    ):
        self.worker = worker
        self.encode = encode
        self.chat = chat or (lambda messages: encode(plain_chat(messages)))
        self.model = model

    def app(self) -> Starlette:
        """The ASGI application; it stops the worker when it shuts down."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.worker.close)

        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/stats", self.stats),
            ],
            exception_handlers={404: _http_error, 405: _http_error},
            lifespan=lifespan,
        )

    async def completions(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=False)

    async def chat_completions(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=True)

    async def models(self, _: HTTPRequest) -> Response:
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, _: HTTPRequest) -> Response:
        await asyncio.wrap_future(self.worker.stats())
        return JSONResponse({"status": "ok"})

    async def stats(self, _: HTTPRequest) -> Response:
        return JSONResponse(await asyncio.wrap_future(self.worker.stats()))

    async def _answer(self, http: HTTPRequest, *, chat: bool) -> Response:
        try:
            request = parse(await _body(http), chat=chat)
            if request.model not in (None, self.model):
                message = f"model must be {self.model!r} or absent, got {request.model[:40]!r}"
                raise BadRequest(message, "model", status=404)
            # In a thread: a long text takes the tokenizer a while, in which others are served.
            tokens = await asyncio.to_thread(self._tokens, request, chat)
            request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
            outputs = await self._submit(request_id, tokens, request)
        except BadRequest as error:
            body = error_body(str(error), "invalid_request_error", error.param)
            return JSONResponse(body, status_code=error.status)
        except Overloaded as error:
            body = error_body(str(error), "overloaded_error")
            return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
        except RuntimeError as error:
            return JSONResponse(error_body(str(error), "server_error"), status_code=500)
        answer = Answer(request_id, self.model, len(tokens), chat=chat)
        if request.stream:
            events = _events(_answered(outputs, request.stop), answer, request.include_usage)
            # Of no effect on a request that has finished.
            return _Stream(events, lambda: self.worker.cancel(request_id))
        return await self._whole(http, request_id, _answered(outputs, request.stop), answer)

    def _tokens(self, request: Request, chat: bool) -> list[int]:
        if isinstance(request.prompt, list) and not chat:
            return request.prompt
        try:
            return (self.chat if chat else self.encode)(request.prompt)
        except ValueError as error:  # such as half of a surrogate pair
            raise BadRequest(str(error), "messages" if chat else "prompt") from None

    async def _submit(self, request_id: str, tokens: list[int], request: Request) -> asyncio.Queue:
        """Hand a request to the engine; what it generates comes through the queue."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()

        def listen(output: Output | Exception) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        accepted = self.worker.submit(request_id, tokens, request.params, listen)
        try:
            await asyncio.wrap_future(accepted)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        except asyncio.CancelledError:
            self.worker.cancel(request_id)
            raise
        return outputs

    async def _whole(
        self, http: HTTPRequest, request_id: str, outputs: AsyncIterator[Output], answer: Answer
    ) -> Response:
        async def collect() -> Response:
            text, reason = "", None
            async for output in outputs:
                answer.tokens += output.token_id >= 0
                text, reason = text + output.text, output.reason
            return JSONResponse(answer.whole(text, reason))

        async def leave() -> Response:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            return Response(status_code=499)  # nobody reads it

        tasks = [asyncio.create_task(collect()), asyncio.create_task(leave())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # If both are done, the answer counts.
            return tasks[0].result() if tasks[0] in done else tasks[1].result()
        except RuntimeError as error:
            return JSONResponse(error_body(str(error), "server_error"), status_code=500)
        finally:
            self.worker.cancel(request_id)  # of no effect on what has finished
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    outputs: AsyncIterator[Output], answer: Answer, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer."""
    first = True
    try:
        async for output in outputs:
            answer.tokens += output.token_id >= 0
            yield _event(answer.chunk(output.text, output.reason, first=first))
            first = False
        if include_usage:
            yield _event(answer.usage())
    except RuntimeError as error:  # the status has been sent: the stream has to tell
        yield _event(error_body(str(error), "server_error"))
    yield "data: [DONE]\n\n"


async def _answered(outputs: asyncio.Queue, stops: Sequence[str]) -> AsyncIterator[Output]:
    """Outputs up to the last, or to the first of the texts that end the answer."""
    stop_text = StopText(stops)
    while True:
        output = await outputs.get()
        if isinstance(output, Exception):
            raise RuntimeError(f"generation failed: {output}")
        text, stopped = stop_text.push(output.text, last=output.finished)
        if stopped:
            yield replace(output, text=text, finished=True, reason="stop")
            return
        yield replace(output, text=text)
        if output.finished:
            return


class _Stream(StreamingResponse):
    """Calls `close` in the end, even if the client left before the first event."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], object]):
        super().__init__(events, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


def _event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _body(http: HTTPRequest) -> bytes:
    body = b""
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise BadRequest(f"the body must have at most {MAX_BODY} bytes", status=413)
    return body


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{http.method} {http.url.path} is not served"
    return JSONResponse(error_body(message, "invalid_request_error"), status_code=status)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]))
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option("--num-pages", default=8192, help="Pages of the KV cache.")
@click.option("--page-size", default=16, help="Tokens per page.")
@click.option("--max-batch-size", default=64, help="Requests per step.")
@click.option("--max-requests", default=256, help="Requests served or waiting; more get a 503.")
@click.option("--cuda-graph/--no-cuda-graph", default=None, help="Default: on a GPU.")
@click.option("--warm-up/--no-warm-up", default=None, help="Default: on a GPU.")
def serve(
    model,
    device,
    dtype,
    host,
    port,
    num_pages,
    page_size,
    max_batch_size,
    max_requests,
    cuda_graph,
    warm_up,
):
    """Serve OpenAI's completion endpoints over HTTP."""
    on_gpu = device.startswith("cuda")
    with reported():
        # First: nobody waits for a model to learn that the port is taken.
        address = bind(host, port)
        loaded, tokenizer = load(model, device, getattr(torch, dtype))
        chat = load_chat(model, tokenizer)
        engine = Engine(
            loaded, tokenizer, num_pages=num_pages, page_size=page_size,
            max_batch_size=max_batch_size, max_batch_tokens=max(2048, max_batch_size),
            use_cuda_graph=on_gpu if cuda_graph is None else cuda_graph,
        )  # fmt: skip
        if on_gpu if warm_up is None else warm_up:
            warmup.warm_up(engine, max_batch_size)
        worker = Worker(engine, max_requests=max_requests)
    name = Path(model).resolve().name if model else "demo"
    app = Server(worker, tokenizer.encode, chat, model=name).app()
    click.echo(f"Serving {name!r} on http://{host}:{address.getsockname()[1]}/v1")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=5)).run(sockets=[address])
