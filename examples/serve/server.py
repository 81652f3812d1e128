"""An HTTP server with OpenAI's completion endpoints in front of an engine.

`/v1/completions` and `/v1/chat/completions`, whole or streamed, `/v1/models`, `/health`,
`/version`, `/metrics` and `/stats`. The event loop parses and writes; the engine runs in a thread
(`Worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from . import kernels, warmup
from .answers import Answer, error_body
from .chat import Chat, load_chat, plain_chat
from .engine import Engine, Output, SamplingParams, load
from .grammar import Grammars
from .limits import Limits, limit_options
from .mistakes import bind, reported
from .options import engine_options, kernels_option
from .protocol import LIMITS, BadRequest, Request, parse
from .startup import describe
from .tokens import ByteTokenizer, Tokenizer
from .worker import Overloaded, Worker

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from .connections import HTTPServer, fit_descriptors
    from .generation import Generation, choices_of
    from .metrics import CONTENT_TYPE_LATEST as CONTENT_TYPE
    from .metrics import Metrics
except ImportError as error:
    raise ImportError('the server needs pip install -e ".[serve]"') from error

_T = TypeVar("_T")
_Outputs = AsyncIterator[tuple[int, Output]]


class _Stopped(RuntimeError):
    """The server ends before the answer does."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


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
    limits : Limits
        What a request may ask for.
    tokenizer : Tokenizer, optional
        The tokenizer that `encode` belongs to; default: bytes.
    grammars : callable, optional
        Makes what turns schemas into grammars when a request first asks for one; ValueError if
        there can be none.
    """

    def __init__(
        self,
        worker: Worker,
        encode: Callable[[str], list[int]],
        chat: Chat | None = None,
        model: str = "model",
        limits: Limits = LIMITS,
        tokenizer: Tokenizer | None = None,
        grammars: Callable[[], Grammars] | None = None,
    ):
        self.worker = worker
        self.encode = encode
        self.chat = chat or (lambda messages, tools=None: encode(plain_chat(messages, tools)))
        self.model = model
        self.limits = limits
        self.tokenizer = tokenizer or ByteTokenizer()
        self.metrics = Metrics()
        self._grammars = functools.cache(grammars or _no_grammars)
        self._created = int(time.time())
        self._stopped = asyncio.Event()
        self._answers: dict[str, Generation] = {}  # of the requests that are under way

    def stop(self) -> None:
        """Fail the requests that are under way, each in its protocol."""
        self._stopped.set()
        for generation in self._answers.values():
            generation.fail(_Stopped())

    def app(self) -> Starlette:
        """The ASGI application; it stops the worker when it shuts down."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.worker.close, self.limits.shutdown_timeout / 8)

        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.prometheus),
                Route("/stats", self.stats),
            ],
            exception_handlers={
                404: _http_error,
                405: _http_error,
                BadRequest: _refused,
                RuntimeError: _failed,
                ClientDisconnect: _left,
                Exception: _failed,
            },
            lifespan=lifespan,
        )

    def http(self, **options: Any) -> HTTPServer:
        """A server of the application, with the limits; `options` of `uvicorn.Config`."""
        return HTTPServer(self.app(), self.limits, self.stop, **options)

    async def completions(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=False)

    async def chat_completions(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=True)

    async def models(self, _: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def one_model(self, http: HTTPRequest) -> Response:
        self._check_model(http.path_params["name"])
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        entry = {"id": self.model, "object": "model", "owned_by": "local"}
        return entry | {"created": self._created}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"model must be {self.model!r} or absent, got {name[:40]!r}"
            raise BadRequest(message, "model", status=404)

    async def version(self, _: HTTPRequest) -> Response:
        return JSONResponse({"version": kernels.package().__version__})

    async def prometheus(self, _: HTTPRequest) -> Response:
        stats = await self._unless_stopped(asyncio.wrap_future(self.worker.stats()))
        return Response(self.metrics.text(stats), media_type=CONTENT_TYPE)

    async def health(self, _: HTTPRequest) -> Response:
        await self._unless_stopped(asyncio.wrap_future(self.worker.stats()))
        return JSONResponse({"status": "ok"})

    async def stats(self, _: HTTPRequest) -> Response:
        stats = await self._unless_stopped(asyncio.wrap_future(self.worker.stats()))
        return JSONResponse(stats)

    async def _answer(self, http: HTTPRequest, *, chat: bool) -> Response:
        body = await _body(http, self.limits.max_body_bytes)
        request = parse(body, chat=chat, limits=self.limits)
        self._check_model(request.model)
        # Before the tokenizer has work with it.
        if len(self._answers) >= self.worker.max_requests:
            raise Overloaded.of(self.worker.max_requests)
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        generation = Generation(self.worker, request_id, request.stop, self.metrics)
        self._answers[request_id] = generation
        try:
            # In a thread: a long text takes the tokenizer a while, in which others are served.
            preparing = asyncio.to_thread(self._prepared, request, chat)
            prompts, params = await self._unless_stopped(preparing)
            submitting = generation.submit(choices_of(prompts, request.n, params))
            await self._unless_stopped(submitting)
        except BaseException as error:
            self._end(request_id)
            if type(error) is ValueError:  # the engine's
                raise BadRequest(str(error)) from None
            raise
        answer = Answer(
            request_id, self.model, prompts, self.tokenizer, request.n, chat,
            params.logprobs is not None, self._echoes(request, prompts), request.only_prompt,
        )  # fmt: skip
        if request.stream:
            events = _events(generation.outputs(), answer, request.include_usage)
            return _Stream(events, lambda: self._end(request_id))
        return await self._whole(http, request_id, generation.outputs(), answer)

    def _end(self, request_id: str) -> None:
        """Forget a request; the engine does so too if it has not finished it."""
        if (generation := self._answers.pop(request_id, None)) is not None:
            generation.cancel()

    def _echoes(self, request: Request, prompts: list[list[int]]) -> list[str] | None:
        if not request.echo:
            return None
        given = zip(request.prompts, prompts, strict=True)
        return [
            text if isinstance(text, str) else self.tokenizer.decode(ids) for text, ids in given
        ]

    async def _unless_stopped(self, work: Awaitable[_T]) -> _T:
        """The result of `work`; `_Stopped` if the server stops first."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((stopped, working), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _Stopped
            return working.result()
        finally:
            stopped.cancel()
            working.cancel()

    def _prepared(self, request: Request, chat: bool) -> tuple[list[list[int]], SamplingParams]:
        """Token ids of the prompts, and the parameters with the grammar."""
        params = request.params
        if request.schema is not None:
            try:
                params = replace(params, grammar=self._grammars().json(request.schema))
            except ValueError as error:
                raise BadRequest(f"response_format: {error}", "response_format") from None
        if params.logprobs is not None:
            self.tokenizer.piece(0)  # the first one takes a while
        return [self._tokens(prompt, request.tools, chat) for prompt in request.prompts], params

    def _tokens(self, prompt: Any, tools: list[dict] | None, chat: bool) -> list[int]:
        try:
            if chat:
                return self.chat(prompt, tools)
            return self.encode(prompt) if isinstance(prompt, str) else prompt
        except ValueError as error:
            param = "prompt" if not chat else "tools" if "tools" in str(error) else "messages"
            raise BadRequest(str(error), param) from None

    async def _whole(
        self, http: HTTPRequest, request_id: str, outputs: _Outputs, answer: Answer
    ) -> Response:
        async def collect() -> Response:
            async for index, output in outputs:
                answer.add(index, output)
            return JSONResponse(answer.whole())

        async def leave() -> Response:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            return await _left(http, ClientDisconnect())

        tasks = [asyncio.create_task(collect()), asyncio.create_task(leave())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # If both are done, the answer counts.
            return tasks[0].result() if tasks[0] in done else tasks[1].result()
        finally:
            self._end(request_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _events(outputs: _Outputs, answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer."""
    try:
        async for index, output in outputs:
            answer.add(index, output)
            yield _event(answer.chunk(index))
        if include_usage:
            yield _event(answer.usage())
    except RuntimeError as error:  # the status has been sent: the stream has to tell
        yield _event(error_body(str(error), "server_error"))
    yield "data: [DONE]\n\n"


def _no_grammars() -> Grammars:
    raise ValueError("this server has no grammars")


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


async def _body(http: HTTPRequest, most: int) -> bytes:
    # A page in a browser can send any other type to any address without being asked.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type must be application/json, got {kind[:40]!r}"
        raise BadRequest(message, status=415)
    length = http.headers.get("content-length", "")
    body = bytearray()
    if not length.isdecimal() or int(length) <= most:
        async for chunk in http.stream():
            body += chunk
            if len(body) > most:
                break
        else:
            return bytes(body)
    raise BadRequest(f"the body must have at most {most} bytes", status=413)


async def _refused(_: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    body = error_body(str(error), "invalid_request_error", error.param)
    return JSONResponse(body, status_code=error.status)


async def _failed(_: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, Overloaded | _Stopped):
        body = error_body(str(error), "overloaded_error")
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
    return JSONResponse(error_body(str(error), "server_error"), status_code=500)


async def _left(_http: HTTPRequest, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{http.method} {http.url.path} is not served"
    return JSONResponse(error_body(message, "invalid_request_error"), status_code=status)


@click.command()
@kernels_option
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
@click.option(
    "--batch-invariant",
    is_flag=True,
    help="Equal seeds give equal tokens, whatever else is served; slower.",
)
@click.option("--access-log", is_flag=True, help="Write a line for each request.")
@engine_options
@limit_options
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
    batch_invariant,
    access_log,
    max_batch_tokens,
    chunked_prefill,
    prefix_caching,
    speculation,
    ngram,
    **limits,
):
    """Serve OpenAI's completion endpoints over HTTP."""
    on_gpu = device.startswith("cuda")
    with reported():
        # First: nobody waits for a model to learn that the port is taken.
        address = bind(host, port)
        loaded, tokenizer = load(model, device, getattr(torch, dtype))
        chat = load_chat(model, tokenizer)
        options = {
            "max_batch_size": max_batch_size,
            "max_batch_tokens": max(max_batch_tokens, max_batch_size),
            "use_cuda_graph": on_gpu if cuda_graph is None else cuda_graph,
            "batch_invariant": batch_invariant,
            "chunked_prefill": chunked_prefill,
            "prefix_caching": prefix_caching,
            "speculation": speculation,
            "ngram": ngram,
        }
        engine = Engine(loaded, tokenizer, num_pages=num_pages, page_size=page_size, **options)
        name = Path(model).resolve().name if model else "demo"
        for line in describe(name, loaded, engine.cache, engine.page_size, options):
            click.echo(line)
        if on_gpu if warm_up is None else warm_up:
            warmup.warm_up(engine, max_batch_size)
        worker = Worker(engine, max_requests=max_requests)
    fitting = fit_descriptors(Limits(**limits))
    if fitting.max_connections < limits["max_connections"]:
        click.echo(f"--max-connections {fitting.max_connections}: open files are limited", err=True)
    config = loaded.config
    server = Server(
        worker, tokenizer.encode, chat, model=name, limits=fitting, tokenizer=tokenizer,
        grammars=lambda: Grammars(tokenizer, config.eos_token_ids, config.vocab_size),
    )  # fmt: skip
    click.echo(f"Serving {name!r} on http://{host}:{address.getsockname()[1]}/v1")
    with contextlib.suppress(KeyboardInterrupt):
        server.http(access_log=access_log).run(sockets=[address])
