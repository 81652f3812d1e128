"""OpenAI's completion requests, as far as the engine has what they ask for.

A field that would have no effect is refused, not ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .engine import SamplingParams
from .limits import Limits

LIMITS = Limits()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BadRequest(ValueError):
    """A request that cannot be served, with the field it is about and an HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes
    ----------
    model : str or None
        Name of the model that is meant.
    prompt : str, list of int or list of dict
        Text, token ids, or the messages of a chat.
    params : SamplingParams
        How to sample.
    stop : tuple of str
        Texts that end the answer; they are left out.
    stream, include_usage : bool
        Answer token by token; with the counts of tokens at the end.
    """

    model: str | None
    prompt: Any
    params: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def _integer(low: int, high: float = math.inf) -> tuple[Callable[[Any], bool], str]:
    text = f"an integer of at least {low}" if high == math.inf else f"an integer from {low} to 2^63"
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v < high, text


def _number(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    def check(value: Any) -> bool:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        )

    return check, f"a number from {low} to {high}"


def _share() -> tuple[Callable[[Any], bool], str]:
    check, _ = _number(0, 1)
    return lambda v: check(v) and v > 0, "a number above 0, up to 1"


def _one_of(*values: Any) -> tuple[Callable[[Any], bool], str]:
    # `1 == True`, but a client that sends one for the other is mistaken.
    text = " or ".join(json.dumps(v) for v in values)
    return lambda v: any(
        v == a and isinstance(v, bool) == isinstance(a, bool) for a in values
    ), text


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_integer(0)[0](v) for v in value)


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text for text in texts)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict)
            and set(m) == {"role", "content"}
            and m["role"] in ("system", "user", "assistant")
            and isinstance(m["content"], str)
            for m in value
        )
    )


# Field -> its check and what is allowed. `null` counts as absent.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda v: isinstance(v, str), "a string"),
    "max_tokens": _integer(1),
    "temperature": _number(0, 2),
    "top_p": _share(),
    "top_k": _integer(0),
    "min_p": _number(0, 1),
    "seed": _integer(0, 2**63),
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "stop": (_is_stop, "a string or a list of strings, none of them empty"),
    "ignore_eos": _one_of(False, True),
    "stream": _one_of(False, True),
    "stream_options": (
        lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}
        and all(isinstance(x, bool) for x in v.values()),
        '{"include_usage": true or false}',
    ),
    "user": (lambda v: isinstance(v, str), "a string"),
    # Of these, only the values that change nothing.
    "n": _one_of(1),
    "frequency_penalty": _one_of(0),
    "presence_penalty": _one_of(0),
}  # fmt: skip
_COMPLETION = _FIELDS | {
    "prompt": (lambda v: isinstance(v, str) or _is_ids(v), "a string or a list of token ids"),
    "echo": _one_of(False),
    "best_of": _one_of(1),
}
_CHAT = _FIELDS | {
    "messages": (
        _is_messages,
        'a list of {"role": "system", "user" or "assistant", "content": a string}, at least one',
    ),
    "max_completion_tokens": _integer(1),
    "logprobs": _one_of(False),
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")


def parse(body: bytes, *, chat: bool, limits: Limits = LIMITS) -> Request:
    """Check the body of a request.

    Parameters
    ----------
    body : bytes
        JSON.
    chat : bool
        Of `/v1/chat/completions` (`messages`), else of `/v1/completions` (`prompt`).
    limits : Limits
        Number and length of stop texts.

    Returns
    -------
    Request
        What it asks for. `max_tokens` is 16 unless told, in a chat as well.

    Raises
    ------
    BadRequest
        What is wrong, and with which field.
    """
    content = _content(body)
    allowed = _CHAT if chat else _COMPLETION
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if name not in allowed:
            raise BadRequest(f"{name[:40]} is not supported", name[:40])
        check, text = allowed[name]
        if not check(value):
            raise BadRequest(f"{name} must be {text}, got {json.dumps(value)[:80]}", name)
    source = "messages" if chat else "prompt"
    if not given.get(source):
        raise BadRequest(f"{source} is required and must not be empty", source)
    stop = _stops(given.get("stop", ()), limits)
    lengths = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(lengths) > 1:
        raise BadRequest("max_tokens and max_completion_tokens must not differ", "max_tokens")
    if "stream_options" in given and not given.get("stream"):
        raise BadRequest("stream_options is only allowed with stream", "stream_options")
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    try:
        params = SamplingParams(
            max_tokens=given.get("max_completion_tokens", given.get("max_tokens", 16)),
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            **sampling,
        )
    except ValueError as error:
        raise BadRequest(str(error)) from None
    usage = given.get("stream_options", {}).get("include_usage", False)
    return Request(
        model=given.get("model"),
        prompt=given[source],
        params=params,
        stop=stop,
        stream=given.get("stream", False),
        include_usage=usage,
    )


def _content(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        content = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body must be JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(content).__name__}")
    if _SURROGATE.search(body):
        _check_text(content)
    return content


def _check_text(content: dict[str, Any]) -> None:
    """Refuse half of a surrogate pair, which an escape can name and no encoder takes."""
    for name, value in content.items():
        for text, param in ((name, None), (value, name)):
            try:
                json.dumps(text, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = f"{param or 'a name'} must be Unicode, it has half of a surrogate pair"
                raise BadRequest(message, param) from None


def _stops(value: str | Sequence[str], limits: Limits) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > limits.max_stops:
        raise BadRequest(
            f"stop must have at most {limits.max_stops} texts, got {len(stops)}", "stop"
        )
    longest = max(map(len, stops), default=0)
    if longest > limits.max_stop_length:
        most = limits.max_stop_length
        raise BadRequest(
            f"stop must have texts of at most {most} characters, got {longest}", "stop"
        )
    return stops
