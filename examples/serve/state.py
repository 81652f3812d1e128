"""What the engine knows of a request, and of a step that the device computes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from .sampling import SamplingParams
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
        Then: "stop" (end-of-text or a stop token) or "length".
    """

    request_id: str
    token_id: int
    text: str
    finished: bool
    reason: str | None


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
    arrival: int = 0  # a later request has a larger number
    computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))  # cheap to put together
    keys: list[bytes] = field(default_factory=list)  # of the pages that are published

    @property
    def missing(self) -> int:
        """Tokens without keys and values; 1 of them: the request decodes."""
        return len(self.tokens) - self.computed

    @property
    def drawn(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class Step:
    """What the device is computing: these requests get these tokens."""

    requests: list[RequestState]
    tokens: torch.Tensor  # on the device, for the next step
    arriving: torch.Tensor  # on the host, valid after `arrived`
    arrived: torch.cuda.Event | None

    @staticmethod
    def of(requests: list[RequestState], tokens: torch.Tensor) -> Step:
        arriving = tokens.to("cpu", non_blocking=True)
        arrived = None
        if tokens.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return Step(requests, tokens, arriving, arrived)

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.arriving.tolist()
