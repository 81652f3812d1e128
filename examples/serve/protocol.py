"""OpenAI's completion requests, as far as the engine has what they ask for.

A field that would have no effect is refused, not ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .engine import SamplingParams
from .fields import CHAT, COMPLETION, Check, is_ids
from .grammar import ANY_OBJECT
from .limits import Limits
from .messages import read_messages

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
    prompts : list
        Completions have texts, or lists of token ids. A chat has its messages, once.
    params : SamplingParams
        How to sample.
    n : int
        Answers to each prompt.
    stop : tuple of str
        Texts that end the answer; they are left out.
    stream, include_usage : bool
        Answer token by token; with the counts of tokens at the end.
    tools : list of dict or None
        Tools that the chat template is told about.
    schema : dict or None
        The JSON schema that answers conform to.
    echo : bool
        Begin each answer with its prompt.
    only_prompt : bool
        Generate nothing.
    """

    model: str | None
    prompts: list[Any]
    params: SamplingParams
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    tools: list[dict[str, Any]] | None
    schema: dict[str, Any] | None
    echo: bool
    only_prompt: bool


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos",
    "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


def parse(body: bytes, *, chat: bool, limits: Limits = LIMITS) -> Request:
    """Check the body of a request.

    Parameters
    ----------
    body : bytes
        JSON.
    chat : bool
        Whether the body is for `/v1/chat/completions` (`messages`), else for `/v1/completions`
        (`prompt`).
    limits : Limits
        Number and length of stop texts.

    Returns
    -------
    Request
        The request that it makes. Without `max_tokens` a completion has 16 tokens, and a chat
        goes on to the end of the context.

    Raises
    ------
    BadRequest
        Says what is wrong, and with which field.
    """
    given = _given(body, CHAT if chat else COMPLETION)
    source = "messages" if chat else "prompt"
    if not given.get(source):
        raise BadRequest(f"{source} is required and must not be empty", source)
    _check_pairs(given, chat)
    n = given.get("n", 1)
    if chat:
        try:
            prompts = [read_messages(given["messages"])]
        except ValueError as error:
            raise BadRequest(str(error), "messages") from None
    else:
        several = isinstance(given["prompt"], list) and not is_ids(given["prompt"])
        prompts = given["prompt"] if several else [given["prompt"]]
    if n * len(prompts) > limits.max_choices:
        message = (
            f"n must be at most {limits.max_choices} in all, got {n} of {len(prompts)} prompts"
        )
        raise BadRequest(message, "n")
    return Request(
        model=given.get("model"),
        prompts=prompts,
        params=_params(given, chat),
        n=n,
        stop=_stops(given.get("stop", ()), limits),
        stream=given.get("stream", False),
        include_usage=given.get("stream_options", {}).get("include_usage", False),
        tools=None if given.get("tool_choice") == "none" else given.get("tools") or None,
        schema=_schema(given.get("response_format", {})),
        echo=given.get("echo", False),
        only_prompt=given.get("max_tokens") == 0,
    )


def _given(body: bytes, allowed: Mapping[str, Check]) -> dict[str, Any]:
    """Fields of a body that are not null, each checked for itself."""
    given = {name: value for name, value in _content(body).items() if value is not None}
    for name, value in given.items():
        if name not in allowed:
            raise BadRequest(f"{name[:40]} is not supported", name[:40])
        check, text = allowed[name]
        if not check(value):
            raise BadRequest(f"{name} must be {text}, got {json.dumps(value)[:80]}", name)
    return given


def _check_pairs(given: Mapping[str, Any], chat: bool) -> None:
    """Refuse fields that contradict each other, or that have no effect without another."""
    lengths = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(lengths) > 1:
        raise BadRequest("max_tokens and max_completion_tokens must not differ", "max_tokens")
    if given.get("max_tokens") == 0 and not given.get("echo"):
        raise BadRequest("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    if "stream_options" in given and not given.get("stream"):
        raise BadRequest("stream_options is only allowed with stream", "stream_options")
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise BadRequest("best_of must be n: all answers are returned", "best_of")
    if chat and "top_logprobs" in given and not given.get("logprobs"):
        raise BadRequest("top_logprobs is only allowed with logprobs", "top_logprobs")
    if given.get("tool_choice") == "auto" and not given.get("tools"):
        raise BadRequest("tool_choice is only allowed with tools", "tool_choice")
    constrained = given.get("response_format", {}).get("type", "text") != "text"
    if constrained and (given.get("ignore_eos") or given.get("stop_token_ids")):
        message = "response_format is not allowed with ignore_eos or stop_token_ids"
        raise BadRequest(message, "response_format")


def _params(given: Mapping[str, Any], chat: bool) -> SamplingParams:
    logprobs = given.get("logprobs")
    if chat:
        logprobs = given.get("top_logprobs", 0) if logprobs else None
    length = given.get("max_completion_tokens", given.get("max_tokens", None if chat else 16))
    bias = {int(token): float(value) for token, value in given.get("logit_bias", {}).items()}
    return SamplingParams(
        max_tokens=None if length is None else max(1, length),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
        logit_bias=bias,
        logprobs=logprobs,
        prompt_logprobs=logprobs if given.get("echo") else None,
        **{name: given[name] for name in _SAMPLING if name in given},
    )


def _schema(response_format: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = response_format.get("type", "text")
    if kind == "json_schema":
        return response_format["json_schema"]["schema"]
    return ANY_OBJECT if kind == "json_object" else None


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
