"""The messages of a chat, checked and in the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content", "name"}
_FIELDS_OF = {"assistant": _FIELDS | {"tool_calls"}, "tool": _FIELDS | {"tool_call_id"}}


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages with text as content, and the arguments of tool calls as objects.

    Parameters
    ----------
    messages : list
        As OpenAI's API has them. A field that is null counts as absent; the parts of a content are
        joined by line ends.

    Returns
    -------
    list of dict
        With "role" and "content"; "name", "tool_calls" and "tool_call_id" if they are given.

    Raises
    ------
    ValueError
        If a message is none of a text model; the field is named.
    """
    return [_read(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _read(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object, got {_shown(message)}")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(_ROLES)}, got {_shown(role)}")
    for name in given:
        if name not in _FIELDS_OF.get(role, _FIELDS):
            raise ValueError(f"{where}.{name[:40]} is not supported in a message of role {role}")
    result = {"role": role, "content": _content(where, given)}
    for name in ("name", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{where}.{name} must be a string, got {_shown(given[name])}")
        if name in given:
            result[name] = given[name]
    if role == "tool" and "tool_call_id" not in given:
        raise ValueError(f"{where}.tool_call_id is required in a message of role tool")
    if "tool_calls" in given:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", given["tool_calls"])
    return result


def _content(where: str, given: dict[str, Any]) -> str:
    content = given.get("content", "" if given.get("tool_calls") else None)
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(
            f"{where}.content must be a string or a list of parts, got {_shown(content)}"
        )
    texts = []
    for number, part in enumerate(content):
        at = f"{where}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise ValueError(f'{at}.type must be "text", got {_shown(kind)}')
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{at}.text must be a string, got {_shown(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{where} must be a list, got {_shown(calls)}")
    result = []
    for number, call in enumerate(calls):
        try:
            function = call["function"]
            name, arguments = function["name"], json.loads(function["arguments"])
        except (TypeError, KeyError, ValueError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(
                f"{where}[{number}] must have a function with a name and arguments, the JSON text "
                f"of an object, got {_shown(call)}"
            )
        # Templates write the arguments themselves: they want the object, not its text.
        function = {"name": name, "arguments": arguments}
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        result.append({**identity, "type": "function", "function": function})
    return result


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]
