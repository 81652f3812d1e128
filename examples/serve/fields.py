"""Checks of the fields of requests: each with a text that says what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from .sampling import MAX_LOGPROBS

Check = tuple[Callable[[Any], bool], str]
_MAX_BIASES = 1024


def _integer(low: int, high: float = math.inf) -> Check:
    """At least `low`, below `high`."""
    if high == math.inf:
        text = f"an integer of at least {low}"
    elif high == 2**63:
        text = f"an integer from {low} to 2^63"
    else:
        text = f"an integer from {low} to {int(high) - 1}"
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v < high, text


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        )

    return check, f"a number from {low} to {high}"


def _above_zero(high: float) -> Check:
    check, _ = _number(0, high)
    return lambda v: check(v) and v > 0, f"a number above 0, up to {high}"


def _one_of(*values: Any) -> Check:
    # `1 == True`, but a client that sends one for the other is mistaken.
    text = " or ".join(json.dumps(v) for v in values)
    return lambda v: any(
        v == a and isinstance(v, bool) == isinstance(a, bool) for a in values
    ), text


def is_ids(value: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(value, list) and all(_integer(0)[0](v) for v in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text for text in texts)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or is_ids(value):
        return True
    return isinstance(value, list) and (
        all(isinstance(v, str) and v for v in value) or all(is_ids(v) and v for v in value)
    )


def _is_stream_options(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= {"include_usage"}
        and all(isinstance(v, bool) for v in value.values())
    )


def _is_logit_bias(value: Any) -> bool:
    number, _ = _number(-100, 100)
    return (
        isinstance(value, dict)
        and len(value) <= _MAX_BIASES
        and all(len(k) < 10 and k.isascii() and k.isdigit() for k in value)
        and all(map(number, value.values()))
    )


def _is_response_format(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if value.get("type") in ("text", "json_object"):
        return set(value) == {"type"}
    given = value.get("json_schema")
    return (
        set(value) == {"type", "json_schema"}
        and value["type"] == "json_schema"
        and isinstance(given, dict)
        and set(given) <= {"name", "description", "schema", "strict"}
        and isinstance(given.get("schema"), dict)
    )


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in value
    )


# Field -> its check and what is allowed. `null` counts as absent.
_FIELDS: dict[str, Check] = {
    "model": (_is_text, "a string"),
    "temperature": _number(0, 2),
    "top_p": _above_zero(1),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "seed": _integer(0, 2**63),
    "n": _integer(1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _above_zero(100),
    "logit_bias": (_is_logit_bias, f"up to {_MAX_BIASES} token ids with numbers from -100 to 100"),
    "stop_token_ids": (is_ids, "a list of token ids"),
    "stop": (_is_stop, "a string or a list of strings, none of them empty"),
    "ignore_eos": _one_of(False, True),
    "response_format": (
        _is_response_format,
        '{"type": "text" or "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    ),
    "stream": _one_of(False, True),
    "stream_options": (_is_stream_options, '{"include_usage": true or false}'),
    # For the client's own records.
    "user": (_is_text, "a string"),
    "safety_identifier": (_is_text, "a string"),
    "prompt_cache_key": (_is_text, "a string"),
    # Only those values of these fields that change nothing.
    "store": _one_of(False),
    "service_tier": _one_of("auto", "default"),
}
COMPLETION = _FIELDS | {
    "prompt": (_is_prompt, "a string, a list of token ids, or a list of either, none empty"),
    "max_tokens": _integer(0),
    "echo": _one_of(False, True),
    "best_of": _integer(1),
    "logprobs": _integer(0, MAX_LOGPROBS + 1),
    "suffix": _one_of(""),
}
CHAT = _FIELDS | {
    "messages": (lambda v: isinstance(v, list), "a list of messages, at least one"),
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "logprobs": _one_of(False, True),
    "top_logprobs": _integer(0, MAX_LOGPROBS + 1),
    "tools": (_is_tools, 'a list of {"type": "function", "function": {"name": ..., ...}}'),
    "tool_choice": _one_of("auto", "none"),
    "parallel_tool_calls": _one_of(True),
    "modalities": _one_of(["text"]),
}
