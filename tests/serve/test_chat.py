"""Chat templates of the serving example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.serve.adjust import unpacked
from examples.serve.chat import load_chat
from examples.serve.grammar import Grammars
from examples.serve.tokens import ByteTokenizer, load_tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <b>"}]
TEMPLATE = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == "assistant" %}{{ raise_exception("no answers") }}{% endif %}
<|{{ m['role'] }}|>{{ m.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""
EXPECTED = "<s><|system|>Be kind.</s>\n<|user|>Hi <b></s>\n<|assistant|>"
PLAIN = "system: Be kind.\nuser: Hi <b>\nassistant:"
BYTES = ByteTokenizer()


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
    chat = load_chat(tmp_path, BYTES)
    assert BYTES.decode(chat(MESSAGES)) == EXPECTED
    with pytest.raises(ValueError, match="no answers"):
        chat([{"role": "assistant", "content": "x"}])


def test_without_a_template(tmp_path: Path):
    assert load_chat(None, BYTES)(MESSAGES) == BYTES.encode(PLAIN)
    configure(tmp_path, bos_token="<s>")
    assert load_chat(tmp_path, BYTES)(MESSAGES) == BYTES.encode(PLAIN)


def write_tokenizer(folder: Path) -> None:
    """Bytes, and a BOS token 0 that the tokenizer puts before every text, as that of Llama does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "template, begins",
    [
        (TEMPLATE, [0]),
        (TEMPLATE.replace("{{ bos_token }}", "<s>"), [0]),
        (TEMPLATE.replace("{{ bos_token }}", "{% if tools is not none %}x{% endif %}"), []),
        (None, [0]),
    ],
    ids=["named", "spelled out", "without", "no template"],
)
def test_a_prompt_begins_once(tmp_path: Path, template: str | None, begins: list[int]):
    """The template or the tokenizer begins a prompt, never both: the ids of `transformers`."""
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path)
    options = {} if template is None else {"chat_template": template}
    configure(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **options)
    # Where older files name them.
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hi")[0] == 0
    got = load_chat(tmp_path, tokenizer)(MESSAGES)
    assert got[: len(begins)] == begins and got.count(0) == len(begins)
    if template is None:
        assert tokenizer.decode(got) == PLAIN
        return
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert got == expected


def test_tools_and_developers(tmp_path: Path):
    """What a template does not know of is refused, or said in a way that it knows."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    developer = {"role": "developer", "content": "x"}
    simple = "{% for m in messages %}{{ m.role }}{% endfor %}"
    configure(tmp_path, chat_template=simple)
    chat = load_chat(tmp_path, BYTES)
    assert BYTES.decode(chat([developer], None)) == "system"
    for arguments in (([developer], tools), ([result], None)):
        with pytest.raises(ValueError, match="knows no tools"):
            chat(*arguments)
    configure(tmp_path, chat_template=simple + "{{ tools | length }}{# developer #}")
    chat = load_chat(tmp_path, BYTES)
    assert BYTES.decode(chat([developer, result], tools)) == "developertool1"
    named = [{"role": "user", "name": "Ann", "content": "x"}, developer]
    without = load_chat(None, BYTES)
    assert BYTES.decode(without(named, None)) == "user (Ann): x\ndeveloper: x\nassistant:"
    with pytest.raises(ValueError, match="no chat template"):
        without(named, tools)


def test_pieces_of_a_tokenizer(tmp_path: Path):
    """Bytes that tokens stand for, parts of characters and special tokens included."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "H\u00e9 {\n"
    ids = tokenizer.encode(text, special=False)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode() and len(ids) == 6
    assert [tokenizer.piece(token) for token in (0, 1)] == [b"<s>", b"</s>"]
    # A grammar allows the same bytes, and the end.
    grammar = Grammars(tokenizer, [1], 300).json({"enum": ["\u00e9"]}).start()
    for token in tokenizer.encode('"\u00e9"', special=False):
        allowed = unpacked(grammar.allowed()[None], 300)[0]
        assert allowed[token] and not allowed[1] and not allowed[258:].any()
        grammar.accept(token)
    assert unpacked(grammar.allowed()[None], 300)[0].nonzero().tolist() == [[1]]
    with pytest.raises(ValueError, match="no end-of-text"):
        Grammars(tokenizer, [], 300)


def test_a_template_reaches_nothing(tmp_path: Path):
    configure(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        load_chat(tmp_path, BYTES)(MESSAGES)
    configure(tmp_path, chat_template="{% for %}")
    with pytest.raises(ValueError, match="wrong"):
        load_chat(tmp_path, BYTES)
