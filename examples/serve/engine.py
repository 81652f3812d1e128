"""Continuous batching: steps of the requests that the scheduler chooses, and what comes of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from . import kernels
from .adjust import Adjustment, adjust
from .ahead import FIRST_ROWS, Compilation, compile_all
from .cache import PagePool
from .checkpoint import load as load
from .copies import to_device
from .grammar import GrammarError
from .invariance import sample_alone
from .logprobs import PromptLogprobs
from .model import Model
from .runner import Chunk, Runner
from .sampling import SamplingParams as SamplingParams
from .sampling import sample
from .scheduler import Scheduled, Scheduler
from .speculation import Speculator
from .state import Draw, RequestState, Step
from .state import Output as Output
from .tokens import TextStream, Tokenizer


class Engine:
    """Serves requests, batching prompts and decoding together; one thread at a time.

    While the device computes a step, the host prepares and launches the next one, if that follows
    whatever the tokens are: the same requests decode on, nobody waits. A request that a token ends
    is in that next step for nothing. What it writes there goes to a page that no other request has
    before the step after, since the device takes them in order.

    Parameters
    ----------
    model : Model
        Result of `load`.
    tokenizer : Tokenizer or None
        Result of `load`. None: prompts are token ids, and outputs have no text.
    num_pages, page_size : int
        Size of the KV cache: pages of all requests, and tokens of a page.
    max_batch_size : int
        Most requests of a step.
    max_batch_tokens : int
        Most new tokens of a step; longer prompts take several.
    kv_dtype : torch.dtype, optional
        Type of the cache: the model's (default), torch.float8_e4m3fn or torch.float8_e5m2.
    use_cuda_graph : bool
        Replay steps in which every request decodes from CUDA graphs.
    batch_invariant : bool
        Let the tokens of a request with a seed depend on the request alone, whatever else is
        served: see `invariance`. Steps take longer.
    max_waiting : int, optional
        Most requests that wait; more are refused. None: any number.
    chunked_prefill : bool
        Divide prompts among steps. Otherwise each is computed in one step, which must have room for
        the longest text that fits the model and the cache, beside the other requests.
    prefix_caching : bool
        Let requests share pages of equal tokens, and keep those of ended ones until they are
        needed, the longest unused first to go.
    speculation : int
        Tokens of a request to guess in a step (see `Speculator`); 0: none.
    ngram : int
        Tokens that must have occurred before for a guess.

    Raises
    ------
    ValueError
        If an argument is out of its range.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        num_pages: int,
        page_size: int = 16,
        max_batch_size: int = 64,
        max_batch_tokens: int = 2048,
        kv_dtype: torch.dtype | None = None,
        use_cuda_graph: bool = False,
        max_waiting: int | None = None,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        speculation: int = 0,
        ngram: int = 3,
        batch_invariant: bool = False,
    ) -> None:
        for name, value in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("max_batch_size", max_batch_size),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
        if max_batch_tokens < max_batch_size:
            raise ValueError(
                f"`max_batch_tokens` must be at least `max_batch_size` {max_batch_size}, "
                f"got {max_batch_tokens}"
            )
        kv_dtype = model.dtype if kv_dtype is None else kv_dtype
        if kv_dtype not in (model.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(
                f"`kv_dtype` must be {model.dtype}, torch.float8_e4m3fn or torch.float8_e5m2, "
                f"got {kv_dtype}"
            )
        if use_cuda_graph and model.device.type != "cuda":
            raise ValueError(f"`use_cuda_graph` needs a GPU, the model is on {model.device}")
        longest = min(model.config.max_positions, num_pages * page_size) + max_batch_size
        if not chunked_prefill and max_batch_tokens < longest:
            raise ValueError(
                f"`max_batch_tokens` must be at least {longest} without `chunked_prefill`: the "
                f"longest text and `max_batch_size`; got {max_batch_tokens}"
            )
        if batch_invariant and not model.is_invariant:
            raise ValueError(f"`batch_invariant` must be False for {model.config.architecture}")
        if model.has_states and speculation:
            raise ValueError(
                f"`speculation` must be 0 for {model.config.architecture}, whose states cannot "
                f"forget a wrong guess; got {speculation}"
            )
        self._model, self._tokenizer = model, tokenizer
        self._page_size, self._max_waiting = page_size, max_waiting
        self._runner = Runner(
            model, num_pages, page_size, kv_dtype, max_batch_size, use_cuda_graph, batch_invariant
        )
        self._batch_invariant = batch_invariant
        self._pool = PagePool(num_pages)
        self._scheduler = Scheduler(
            self._pool, page_size, max_batch_size, max_batch_tokens, model.config.rotation,
            # A state is that of one length: there is nothing to share.
            prefix_caching and not model.has_states, chunked_prefill,
        )  # fmt: skip
        self._speculator = Speculator(speculation, ngram) if speculation != 0 else None
        self._live: dict[str, RequestState] = {}
        self._ahead: Step | None = None  # launched before the tokens of the one before are known
        self._compilation: Compilation | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._live)

    @property
    def page_size(self) -> int:
        """Tokens of a page of the KV cache."""
        return self._page_size

    @property
    def cache(self) -> torch.Tensor:
        """Keys and values, ``[layers, pages, 2, page_size, heads, head_dim]``, or as
        `Body.page_shape` says."""
        return self._runner.cache

    def build(self, rows: Sequence[int] = FIRST_ROWS, whole: bool = True) -> None:
        """Compile in parallel what requests need; without a GPU, nothing.

        `rows`: of steps, as in `compile_all`; those of others select further kernels of products.
        Not `whole`: only what a prompt's first token needs is waited for. The rest goes on, until
        a step waits for what it needs, and a graph that is captured for all.
        """
        if self._model.device.type != "cuda":
            return
        if self._compilation is not None:
            self._compilation.wait()
        dtype = self._runner.kv_dtype
        self._compilation = compile_all(
            self._model, self._page_size, dtype, self._batch_invariant, rows
        )
        self._runner.before_capture = self._compilation.wait
        if whole:
            self._compilation.wait()
        else:
            self._compilation.wait_for_prompt()

    def stats(self) -> dict[str, Any]:
        """Pages (in all, and free), requests (running, waiting), and counts since the beginning.

        These are: seconds of compilation, tokens of prompts that were found in the cache, tokens
        that were guessed, and guesses that were right.
        """
        return {
            "pages_total": self._pool.num_pages,
            "pages_free": self._pool.num_free,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "compile_seconds": kernels.compile_seconds(),
            "cached_tokens": self._scheduler.cached_tokens,
            "drafted_tokens": self._speculator.proposed if self._speculator else 0,
            "accepted_tokens": self._speculator.accepted if self._speculator else 0,
        }

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        request_id : str
            A name that no request in the engine has.
        prompt : str or list of int
            Text, or token ids.
        params : SamplingParams
            How to draw, and how many tokens.

        Raises
        ------
        ValueError
            If the prompt is empty, has ids outside the vocabulary or is too long, a parameter is
            out of its range, or too many wait. Nothing is queued then.
        """
        params.check()
        vocabulary = self._model.config.vocab_size
        if any(not 0 <= token < vocabulary for token in params.logit_bias):
            raise ValueError(f"`logit_bias` must have ids from 0 to {vocabulary - 1}")
        if request_id in self._live:
            raise ValueError(f"`request_id` must be new, {request_id!r} is being served")
        tokens = self._tokens(prompt)
        most = self._most_tokens(len(tokens), params.max_tokens)
        waiting = len(self._scheduler.waiting)
        if self._max_waiting is not None and waiting >= self._max_waiting:
            raise ValueError(f"over capacity: {waiting} requests wait, try again later")
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._model.config.eos_token_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        text = None if self._tokenizer is None else TextStream(self._tokenizer)
        request = RequestState(request_id, tokens, len(tokens), params, seed, stops, text, most)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobs(tuple(tokens), params.prompt_logprobs)
        self._scheduler.add(request)
        self._live[request_id] = request

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its pages; False if there is none of this name."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._forget(request)
        return True

    def step(self) -> list[Output]:
        """Serve the requests that fit for one forward pass; their new tokens."""
        if not self._live:
            self._ahead = None
            return []
        with self._runner.backend():
            step, self._ahead = self._ahead, None
            if step is None or not any(map(self._is_served, step.requests)):
                step = self._launch(self._next_step())
            if step is None:
                return []  # parts of long prompts
            self._ahead = step  # if the launch fails, its tokens are still there to be taken
            # Which tokens of a step with guesses count is known when it has ended.
            # No token waits for what the next one needs.
            is_alone = self._speculator or not self._is_compiled
            following = None if is_alone else self._scheduler.foresee(step.requests)
            self._ahead = None if following is None else self._launch(following, step.tokens)
            tokens = step.wait()
        outputs, row = [], 0
        for draw in step.draws:
            if self._is_served(draw.request):
                outputs += self._accept_draw(step, draw, row, tokens[row : row + draw.rows])
            row += draw.rows
        return outputs

    @property
    def _is_compiled(self) -> bool:
        return self._compilation is None or self._compilation.is_done

    def _next_step(self) -> Scheduled:
        scheduled = self._scheduler.schedule()
        return (
            self._speculator.extend(scheduled, self._scheduler) if self._speculator else scheduled
        )

    def _launch(
        self, scheduled: Sequence[tuple[RequestState, Chunk]], tokens: torch.Tensor | None = None
    ) -> Step | None:
        """Start a step; None if no request gets a token from it. `tokens`: see `Runner.run`."""
        logits = self._runner.run([chunk for _, chunk in scheduled], tokens)
        draws, rows, row = [], [], 0
        for request, chunk in scheduled:
            # Prompts in parts draw nothing before their end.
            if chunk.end >= len(request.tokens):
                draws.append(
                    Draw(request, chunk.tokens[len(chunk.tokens) - chunk.drafts :], chunk.end)
                )
                rows += range(row, row + 1 + chunk.drafts)
            row += 1 + chunk.drafts
        step = None
        if draws:
            if len(rows) < len(logits):
                logits = logits[to_device(rows, torch.int64, logits.device)]
            step = Step.of(draws, logits, self._draw(draws, logits))
        # Last: a step that failed can be tried again.
        if step is not None:
            step.count()
        for request, chunk in scheduled:
            request.computed = chunk.end
            self._scheduler.publish(request)
        return step

    def _draw(self, draws: list[Draw], logits: torch.Tensor) -> torch.Tensor:
        """A token of each row, as the rows' requests want it."""
        for draw in draws:
            request = draw.request
            if request.adjustment is None and request.params.adjusts:
                prompt = request.tokens[: request.prompt_length]
                request.adjustment = Adjustment(
                    request.params, prompt, logits.shape[1], logits.device
                )
        requests = [draw.request for draw in draws for _ in range(draw.rows)]
        draw_rows = sample_alone if self._batch_invariant else sample
        return draw_rows(
            adjust(logits, [request.adjustment for request in requests]),
            [request.params for request in requests],
            [request.seed for request in requests],
            [d.end - d.request.prompt_length + row for d in draws for row in range(d.rows)],
        )

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("`prompt` must be token ids: the engine has no tokenizer")
            tokens = self._tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        vocabulary = self._model.config.vocab_size
        if not tokens:
            raise ValueError("`prompt` must not be empty")
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"`prompt` must have ids from 0 to {vocabulary - 1}, got {token}")
        return tokens

    def _most_tokens(self, prompt: int, generated: int | None) -> int:
        """Tokens to generate, checked; None: as many as there is room for."""
        positions = self._model.config.max_positions
        if generated is None:
            room = min(positions, self._pool.num_pages * self._page_size + 1) - prompt
            generated = max(1, room)
        if prompt + generated > positions:
            raise ValueError(
                f"too long: {prompt} tokens of `prompt` and {generated} of `max_tokens` are more "
                f"than the model's {positions} positions"
            )
        # The last token is not computed.
        pages = -(-(prompt + generated - 1) // self._page_size)
        if pages > self._pool.num_pages:
            raise ValueError(
                f"too long: {prompt} tokens of `prompt` and {generated} of `max_tokens` need "
                f"{pages} pages of the KV cache, which has {self._pool.num_pages}"
            )
        return generated

    def _accept_draw(self, step: Step, draw: Draw, row: int, tokens: Sequence[int]) -> list[Output]:
        """The tokens of a request that count: up to the first that was not guessed."""
        outputs: list[Output] = []
        for number, token in enumerate(tokens):
            output = self._accept(draw.request, token)
            count = draw.request.params.logprobs
            if step.logprobs is not None and count is not None:
                output.logprobs = step.logprobs.read(row + number, token, count)
            outputs.append(output)
            guessed = number < len(draw.draft) and draw.draft[number] == token
            if output.finished or not guessed:
                break
            draw.request.computed += 1  # the guess has been computed
        if self._speculator:
            self._speculator.proposed += len(draw.draft)
            self._speculator.accepted += len(outputs) - 1
        return outputs

    def _accept(self, request: RequestState, token: int) -> Output:
        rotation = self._scheduler.rotation_of(request)
        request.tokens.append(token)
        reason = error = None
        if token in request.stops:
            reason = "stop"
        elif request.drawn >= request.max_tokens:
            reason = "length"
        if request.adjustment is not None and request.adjustment.matcher is not None:
            try:
                request.adjustment.matcher.accept(token)
            except GrammarError as failure:  # too complex: no other request suffers
                reason, error = "error", str(failure)
        text = ""
        if (stream := request.text) is not None:
            text = stream.flush() if reason == "stop" else stream.push(token, reason is not None)
        scores = request.prompt_logprobs if request.drawn == 1 else None
        if reason is not None:
            self._scheduler.publish(request)
            self._forget(request)
        elif self._scheduler.rotation_of(request) != rotation:
            self._scheduler.release(request)  # its keys have the other frequencies: computed again
        output = Output(request.id, token, text, reason is not None, reason, error)
        output.prompt_logprobs = None if scores is None else scores.entries
        return output

    def _is_served(self, request: RequestState) -> bool:
        """Whether it has neither ended nor been cancelled, even if its name has come back."""
        return self._live.get(request.id) is request

    def _forget(self, request: RequestState) -> None:
        self._scheduler.forget(request)
        del self._live[request.id]
