"""Chat templates of the serving example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.serve.chat import load_chat, plain_chat

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <b>"}]
TEMPLATE = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == "assistant" %}{{ raise_exception("no answers") }}{% endif %}
<|{{ m['role'] }}|>{{ m.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""
EXPECTED = "<|system|>Be kind.</s>\n<|user|>Hi <b></s>\n<|assistant|>"


def configure(folder: Path, **content: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_the_template_of_the_model(tmp_path: Path, where: str):
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    if where == "config":
        configure(tmp_path, **tokens, chat_template=TEMPLATE)
    elif where == "named":
        other = {"name": "tool_use", "template": "{{ wrong }}"}
        named = [other, {"name": "default", "template": TEMPLATE}]
        configure(tmp_path, **tokens, chat_template=named)
    else:
        configure(tmp_path, **tokens, chat_template="{{ older }}")
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    chat = load_chat(tmp_path)
    assert chat(MESSAGES).strip() == EXPECTED
    with pytest.raises(ValueError, match="no answers"):
        chat([{"role": "assistant", "content": "x"}])


def test_without_a_template(tmp_path: Path):
    assert load_chat(None) is plain_chat and load_chat(tmp_path) is plain_chat
    configure(tmp_path, bos_token="<s>")
    assert load_chat(tmp_path)(MESSAGES) == "system: Be kind.\nuser: Hi <b>\nassistant:"


def test_a_template_reaches_nothing(tmp_path: Path):
    configure(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        load_chat(tmp_path)(MESSAGES)
    configure(tmp_path, chat_template="{% for %}")
    with pytest.raises(ValueError, match="wrong"):
        load_chat(tmp_path)
