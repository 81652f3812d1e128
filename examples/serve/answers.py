"""The JSON that answers OpenAI's completion requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine import Output
from .logprobs import TokenLogprob
from .tokens import Tokenizer


def error_body(message: str, kind: str, param: str | None = None) -> dict:
    """JSON of an error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@dataclass
class _Choice:
    """State of one of the answers."""

    texts: list[str] = field(default_factory=list)
    entries: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    reason: str | None = None
    offset: int = 0  # characters of the tokens whose probabilities have been told
    begun: bool = False


@dataclass
class Answer:
    """The JSON objects that answer one request.

    Attributes
    ----------
    request_id, model : str
        As they appear in the answer.
    prompts : sequence of list of int
        Token ids.
    n : int
        Answers to each prompt.
    chat : bool
        In the form of a chat completion.
    logprobs : bool
        With the probabilities of tokens.
    echoes : sequence of str, optional
        Texts of the prompts, with which the answers begin.
    only_prompt : bool
        Leave out what is generated.
    tokenizer : Tokenizer
        For the tokens of `logprobs`.
    """

    request_id: str
    model: str
    prompts: Sequence[list[int]]
    tokenizer: Tokenizer
    n: int = 1
    chat: bool = False
    logprobs: bool = False
    echoes: Sequence[str] | None = None
    only_prompt: bool = False

    def __post_init__(self) -> None:
        self._created = int(time.time())
        self._tokens = 0
        self._choices = [_Choice() for _ in range(self.n * len(self.prompts))]

    def add(self, index: int, output: Output) -> None:
        """Take a token of the choice `index`."""
        choice = self._choices[index]
        if not choice.begun and self.echoes is not None:
            prompt = self.prompts[index // self.n]
            choice.texts.append(self.echoes[index // self.n])
            choice.entries += zip(prompt, output.prompt_logprobs or [], strict=False)
        choice.reason = output.reason
        if self.only_prompt:
            choice.reason = "length"
        else:
            self._tokens += output.token_id >= 0
            choice.texts.append(output.text)
            if output.logprobs is not None:
                choice.entries.append((output.token_id, output.logprobs))

    def whole(self) -> dict:
        """The whole answer."""
        choices = []
        for index in range(len(self._choices)):
            text, choice = self._take(index)
            choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {}
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, choices, usage=True)

    def chunk(self, index: int) -> dict:
        """Text added to a choice since its last piece, as a piece of a stream."""
        first = not self._choices[index].begun
        text, choice = self._take(index)
        if self.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        return self._body(self._stream_kind, [choice])

    def usage(self) -> dict:
        """The last piece of a stream, which counts the tokens."""
        return self._body(self._stream_kind, [], usage=True)

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _body(self, kind: str, choices: list[dict], usage: bool = False) -> dict:
        head = {"id": self.request_id, "created": self._created, "model": self.model}
        body: dict[str, Any] = {**head, "object": kind, "choices": choices}
        if usage:
            prompt = sum(map(len, self.prompts))
            body["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": self._tokens,
                "total_tokens": prompt + self._tokens,
            }
        return body

    def _take(self, index: int) -> tuple[str, dict[str, Any]]:
        """New text of a choice, and what both kinds of answer have."""
        choice = self._choices[index]
        text = "".join(choice.texts)
        logprobs = None
        if self.logprobs:
            logprobs = self._chat_logprobs(choice) if self.chat else self._logprobs(choice)
        choice.texts, choice.entries, choice.begun = [], [], True
        body = {"index": index, "finish_reason": choice.reason, "logprobs": logprobs}
        return text, body if self.chat else body | {"text": text}

    def _logprobs(self, choice: _Choice) -> dict[str, list]:
        """Lists with an element for each token; None where nothing is before it."""
        result: dict[str, list] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, entry in choice.entries:
            result["tokens"].append(self._name(token))
            result["token_logprobs"].append(None if entry is None else entry.logprob)
            result["top_logprobs"].append(
                None if entry is None else {self._name(t): value for t, value in entry.top}
            )
            result["text_offset"].append(choice.offset)
            choice.offset += len(self.tokenizer.piece(token).decode(errors="ignore"))
        return result

    def _chat_logprobs(self, choice: _Choice) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            piece = list(self.tokenizer.piece(token))
            return {"token": self._name(token), "logprob": logprob, "bytes": piece}

        content = [
            one(token, entry.logprob) | {"top_logprobs": [one(*other) for other in entry.top]}
            for token, entry in choice.entries
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def _name(self, token: int) -> str:
        """Its text; that of part of a character tells its bytes, so that no two are the same."""
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
