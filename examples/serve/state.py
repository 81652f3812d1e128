"""State of a request, and of a step that the device computes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .adjust import Adjustment
from .copies import to_host
from .logprobs import LogprobTensors, PromptLogprobs, TokenLogprob
from .sampling import SamplingParams
from .speculation import NgramIndex
from .tokens import TextStream


@dataclass
class Output:
    """A new token of a request.

    Attributes
    ----------
    request_id : str
        Whose.
    token_id : int
        The token.
    text : str
        Text that became final, possibly empty; of a token that stops the request, what was held
        back before it.
    finished : bool
        Whether it is the request's last.
    reason : str or None
        Then: "stop" (end-of-text or a stop token), "length", or "error".
    error : str or None
        Then: what is wrong with this request.
    logprobs : TokenLogprob or None
        If they are asked for.
    prompt_logprobs : list or None
        With the first token, if they are asked for: of each of the prompt's tokens a
        `TokenLogprob`, None for the first.
    """

    request_id: str
    token_id: int
    text: str
    finished: bool
    reason: str | None
    error: str | None = None
    logprobs: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(eq=False)
class RequestState:
    """`tokens` are prompt and generated; the first `computed` have keys and values in `pages`."""

    id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    text: TextStream | None
    max_tokens: int = 16
    prompt_logprobs: PromptLogprobs | None = None
    adjustment: Adjustment | None = None  # from the first token that is drawn on
    ngrams: NgramIndex | None = None
    arrival: int = 0  # a later request has a larger number
    computed: int = 0
    slot: int | None = None  # where its states are, while it runs
    pages: array[int] = field(default_factory=lambda: array("i"))  # cheap to put together
    keys: list[bytes] = field(default_factory=list)  # of the pages that are published

    @property
    def missing(self) -> int:
        """Tokens without keys and values; 1 of them: the request decodes."""
        return len(self.tokens) - self.computed

    @property
    def drawn(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def score(self) -> Callable[[int, torch.Tensor], None] | None:
        """Receiver of the logits of the prompt, until it has them."""
        scores = self.prompt_logprobs
        return None if scores is None or scores.complete else scores.take


@dataclass
class Draw:
    """Tokens that a step draws for a request: the next, and one after each that is guessed."""

    request: RequestState
    draft: Sequence[int]
    end: int  # tokens of the request before

    @property
    def rows(self) -> int:
        return 1 + len(self.draft)


@dataclass
class Step:
    """What the device is computing: these requests get these tokens, a row of logits each."""

    draws: list[Draw]
    tokens: torch.Tensor  # on the device, for the next step: int32 or int64
    arriving: torch.Tensor  # on the host, valid after `arrived`
    logprobs: LogprobTensors | None  # likewise
    arrived: torch.cuda.Event | None

    @staticmethod
    def of(draws: list[Draw], logits: torch.Tensor, tokens: torch.Tensor) -> Step:
        """Fetch tokens, and the log-probabilities that are asked for, by the model's logits."""
        counts = [d.request.params.logprobs for d in draws]
        asked = [count for count in counts if count is not None]
        logprobs = LogprobTensors.of(logits, tokens, max(asked)) if asked else None
        arriving, arrived = to_host(tokens)  # last: then the others have arrived as well
        return Step(draws, tokens, arriving, logprobs, arrived)

    @property
    def requests(self) -> list[RequestState]:
        return [draw.request for draw in self.draws]

    def count(self) -> None:
        """Let each request take note of its token, on the device."""
        row = 0
        for draw in self.draws:
            # Those whose logits depend on it have no guesses.
            if draw.request.adjustment is not None:
                draw.request.adjustment.count(self.tokens[row : row + 1])
            row += draw.rows

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.arriving.tolist()
