"""From the messages of a chat to a prompt, by the template that comes with a model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .files import read_json
from .tokens import Tokenizer

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
Chat = Callable[[Messages, "Tools | None"], list[int]]


def plain_chat(messages: Messages, tools: Tools | None = None) -> str:
    """A chat as text, for models without a template: a line per message, then the answer.

    Raises
    ------
    ValueError
        If there are tools, of which a line cannot tell.
    """
    if tools or any("tool_calls" in message for message in messages):
        raise ValueError("the model has no chat template, and without one no tools")

    def speaker(message: dict[str, Any]) -> str:
        name = message.get("name")
        return f"{message['role']} ({name})" if name else message["role"]

    return "".join(f"{speaker(m)}: {m['content']}\n" for m in messages) + "assistant:"


def load_chat(folder: str | Path | None, tokenizer: Tokenizer) -> Chat:
    """Load the function that turns messages into a prompt.

    Parameters
    ----------
    folder : path, optional
        Folder of a model in Hugging Face's format. Its template is ``chat_template.jinja``, or the
        ``chat_template`` of ``tokenizer_config.json`` (of several, the one named "default").
    tokenizer : Tokenizer
        Tokenizer of that model.

    Returns
    -------
    callable
        Messages (of `read_messages`) and tools, or None, to token ids; ValueError if the template
        refuses them or knows no tools. Developer messages are system messages to a template that
        does not know the role. A template writes the special tokens of a prompt itself, and the
        tokenizer adds none; without a template it is `plain_chat`, encoded as any prompt.

    Raises
    ------
    ValueError
        If the template is none.
    """
    source, special = _find(Path(folder)) if folder else (None, {})
    if source is None:
        return lambda messages, tools=None: tokenizer.encode(plain_chat(messages, tools))
    # A template is part of a downloaded file: it can compute, but reach nothing of this process.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template of {folder} is wrong: {error}") from error

    def chat(messages: Messages, tools: Tools | None = None) -> list[int]:
        _check_tools(source, messages, tools)
        if "developer" not in source:
            roles = {"developer": "system"}
            messages = [m | {"role": roles.get(m["role"], m["role"])} for m in messages]
        # Templates may ask if there are tools or documents, and take undefined ones for some.
        names = special | {"tools": tools, "documents": None}
        names |= {"messages": messages, "add_generation_prompt": True}
        try:
            text = template.render(names)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses `messages`: {error}") from None
        return tokenizer.encode(text, special=False)

    return chat


def _check_tools(source: str, messages: Messages, tools: Tools | None) -> None:
    """A template that does not know of tools would leave them out, without a word."""
    calls = any(m["role"] == "tool" or "tool_calls" in m for m in messages)
    if (tools and "tools" not in source) or (calls and "tool" not in source):
        raise ValueError("the model's chat template knows no tools")


def _find(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Template, and the special tokens that it may name."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    special = {}
    older = folder / "special_tokens_map.json"
    known = read_json(older) if older.is_file() else {}
    for name, value in {**known, **config}.items():
        if name.endswith("_token") and value is not None:
            special[name] = value["content"] if isinstance(value, dict) else value
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(), special
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template, special


def _refuse(message: str) -> None:
    raise TemplateError(message)
