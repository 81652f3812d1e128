"""The choices of one answer, while the engine generates them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from .engine import Output, SamplingParams
from .metrics import Metrics
from .stops import StopText
from .worker import Worker


@dataclass
class Choice:
    """Input of one of the choices."""

    prompt: list[int]
    params: SamplingParams


def choices_of(prompts: Sequence[list[int]], n: int, params: SamplingParams) -> list[Choice]:
    """`n` choices of each prompt; with a seed, the i-th has the seed plus i."""
    return [
        Choice(
            prompt,
            params
            if params.seed is None or not number
            else replace(params, seed=(params.seed + number) % (1 << 63)),
        )
        for prompt in prompts
        for number in range(n)
    ]


class Generation:
    """Requests to the engine that belong together.

    Parameters
    ----------
    worker : Worker
        Runs the engine.
    request_id : str
        Name of the whole request.
    stops : sequence of str
        Texts that end a choice.
    metrics : Metrics
        Told of every token.
    """

    def __init__(
        self, worker: Worker, request_id: str, stops: Sequence[str], metrics: Metrics
    ) -> None:
        self._worker, self._request_id, self._stops = worker, request_id, stops
        self._metrics = metrics
        self._ids: list[str] = []
        self._left: set[int] = set()  # choices that have not ended
        self._outputs: asyncio.Queue[tuple[int, Output] | Exception] = asyncio.Queue()

    async def submit(self, choices: Sequence[Choice]) -> None:
        """Hand the choices to the engine; ValueError if it refuses one."""
        accepted = [self._submit(index, choice) for index, choice in enumerate(choices)]
        results = await asyncio.gather(*accepted, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._left = set(range(len(choices)))

    def _submit(self, index: int, choice: Choice) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        watch = self._metrics.watch(len(choice.prompt))

        def listen(output: Output | Exception) -> None:
            watch(output)
            what: tuple[int, Output] | Exception = RuntimeError(f"generation failed: {output}")
            if isinstance(output, Output):
                what = (index, output)
            loop.call_soon_threadsafe(self._outputs.put_nowait, what)

        name = f"{self._request_id}-{index}"
        self._ids.append(name)
        return asyncio.wrap_future(self._worker.submit(name, choice.prompt, choice.params, listen))

    def fail(self, error: Exception) -> None:
        """End it by an error."""
        self._outputs.put_nowait(error)

    def cancel(self) -> None:
        """End it; of no effect on choices that have finished."""
        for name in self._ids:
            self._worker.cancel(name)
        for _ in self._left:
            self._metrics.ended("cancelled")
        self._left = set()

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Tokens with the index of their choice, until all choices have ended.

        The first stop text ends a choice and is left out. So is the probability of a token that
        ends one, as it has no text.

        Raises
        ------
        RuntimeError
            If the engine failed.
        Exception
            That of `fail`.
        """
        texts = [StopText(self._stops) for _ in self._ids]
        while self._left:
            item = await self._outputs.get()
            if isinstance(item, Exception):
                raise item
            index, output = item
            if index not in self._left:
                continue  # generated before the engine knew of the stop text
            if output.error is not None:
                raise RuntimeError(f"generation failed: {output.error}")
            if output.reason == "stop":
                output = replace(output, logprobs=None)
            text, stopped = texts[index].push(output.text, last=output.finished)
            output = replace(output, text=text)
            if stopped:
                output = replace(output, finished=True, reason="stop")
                self._worker.cancel(self._ids[index])
            if output.finished:
                self._left.remove(index)
                self._metrics.ended(output.reason or "")
            yield index, output
