"""From the messages of a chat to a prompt, by the template that comes with a model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, str]]


def plain_chat(messages: Messages) -> str:
    """A chat as text, for models without a template: a line per message, then the answer."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def load_chat(folder: str | Path | None) -> Callable[[Messages], str]:
    """What turns messages into a prompt.

    Parameters
    ----------
    folder : path, optional
        Of a model in Hugging Face's format. Its template is ``chat_template.jinja``, or the
        ``chat_template`` of ``tokenizer_config.json`` (of several, the one named "default").

    Returns
    -------
    callable
        Messages (dicts with "role" and "content") to text without the token that begins every
        prompt, which the tokenizer adds; ValueError if the template refuses them. `plain_chat`
        where there is no template.

    Raises
    ------
    ValueError
        If the template is none.
    """
    source, special = _find(Path(folder)) if folder else (None, {})
    if source is None:
        return plain_chat
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

    def chat(messages: Messages) -> str:
        try:
            return template.render(
                special | {"messages": messages, "add_generation_prompt": True, "bos_token": ""}
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses `messages`: {error}") from None

    return chat


def _find(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Template, and the special tokens that it may name."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    special = {}
    for name, value in config.items():
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
