"""OpenAI's own client against every endpoint, with a small model of random weights."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='the server needs pip install -e ".[serve]"')
pytest.importorskip("llguidance", reason='schemas need pip install -e ".[serve]"')
openai = pytest.importorskip("openai", reason='the client needs pip install -e ".[dev]"')
prometheus = pytest.importorskip("prometheus_client.parser")

import flashinfer  # noqa: E402
from examples.serve.chat import load_chat  # noqa: E402
from examples.serve.engine import Engine, SamplingParams  # noqa: E402
from examples.serve.grammar import Grammars  # noqa: E402
from examples.serve.model import Model  # noqa: E402
from examples.serve.tokens import BYTE_LEVEL_EOS, ByteTokenizer  # noqa: E402
from tests.serve.test_server import Site, running  # noqa: E402

POSITIONS = 128  # of the model
TEMPLATE = """{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for m in messages %}<{{ m.role }}{{ m.name or "" }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}({{ call.function.arguments.x }}){% endfor %}
{%- endfor %}<assistant>"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
NO_SPACES = {"32": -100, "10": -100}  # these weights would write many


class Seen(Engine):
    """Remembers the prompts and parameters that it is given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        super().add_request(request_id, prompt, params)
        self.prompts.append(ByteTokenizer().decode(prompt))
        self.params.append(params)


@pytest.fixture(scope="module")
def engine(model: Model) -> Seen:
    return Seen(model, ByteTokenizer(), num_pages=256, page_size=4, speculation=2)


@pytest.fixture(scope="module")
def site(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with running(engine) as site:
        site.server.chat = load_chat(folder, ByteTokenizer())
        site.server._grammars = lambda: Grammars(ByteTokenizer(), [BYTE_LEVEL_EOS], 257)
        yield site
        stats = engine.stats()
        assert stats["pages_free"] == 256 and stats["running"] == stats["waiting"] == 0


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Any]:
    url = f"http://127.0.0.1:{site.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, prompt: Any = "Hi", **options: Any) -> Any:
    options = {"max_tokens": 3, "temperature": 0.0, **options}
    extra = {"extra_body": {"ignore_eos": True, **options.pop("extra_body", {})}}
    return client.completions.create(model="fake", prompt=prompt, **extra, **options)


def chat(client: Any, content: Any = "Hi", **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": content}])
    return client.chat.completions.create(model="fake", messages=messages, **options)


def test_models_and_the_rest(client: Any, site: Site):
    (model,) = client.models.list().data
    assert model.id == "fake" and client.models.retrieve("fake").created == model.created > 1e9
    with pytest.raises(openai.NotFoundError, match="'other/name'"):
        client.models.retrieve("other/name")
    assert site.ask("/health") == (200, {"status": "ok"})
    assert site.ask("/version") == (200, {"version": flashinfer.__version__})


def test_prompts_and_answers_to_each(client: Any):
    one = complete(client, "Hi").choices[0].text
    answer = complete(client, ["Hi", "Ho"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices][:2] == [one, one]
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 12
    ids = complete(client, [[72, 105], [72, 111]])
    assert [c.text for c in ids.choices] == [answer.choices[0].text, answer.choices[2].text]


def test_choices_differ_and_repeat_with_a_seed(client: Any):
    drawn = [
        [c.text for c in complete(client, n=3, seed=5, temperature=1.5, max_tokens=8).choices]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    last = complete(client, seed=7, temperature=1.5, max_tokens=8).choices[0].text
    assert last == drawn[0][2]  # its seed is the next but one


def test_streams_of_several_choices(client: Any):
    whole = complete(client, ["Hi", "Ho"], max_tokens=6)
    texts = {0: "", 1: ""}
    reasons = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for piece in complete(client, ["Hi", "Ho"], max_tokens=6, **options):
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = piece.usage
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"} and usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_log_probabilities(client: Any, stream: bool):
    options = {"echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
    answer = complete(client, "Hello", **options)
    choices = [piece.choices[0] for piece in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    names, values, tops, offsets = (
        [value for choice in choices for value in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert text.startswith("Hello") and names[:5] == list("Hello")
    assert values[0] is None and tops[0] is None and all(value < 0 for value in values[1:])
    assert len(names) == 7 and offsets[:6] == [0, 1, 2, 3, 4, 5]
    assert all(len(top) == 2 for top in tops[1:])
    # What is drawn greedily is the most probable.
    assert [max(top, key=top.get) for top in tops[5:]] == names[5:]


def test_probabilities_of_the_prompt_alone(client: Any):
    answer = complete(client, "Hello", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "Hello" and answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.token_logprobs) == 5
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        complete(client, "Hello", max_tokens=0)


def test_log_probabilities_of_a_chat(client: Any):
    options = {"logprobs": True, "max_tokens": 4, "temperature": 0.0}
    answer = chat(client, top_logprobs=5, **options).choices[0].logprobs.content
    assert len(answer) == 4
    for entry in answer:
        assert entry.logprob == entry.top_logprobs[0].logprob < 0 and len(entry.top_logprobs) == 5
        total = math.fsum(math.exp(top.logprob) for top in entry.top_logprobs)
        assert 5 / 257 < total < 1 and len(entry.bytes) in (1, 5)
    assert [e.top_logprobs for e in chat(client, **options).choices[0].logprobs.content] == [[]] * 4
    with pytest.raises(openai.BadRequestError, match="top_logprobs is only"):
        chat(client, top_logprobs=5)


def test_a_chat_goes_on_to_the_end_of_the_context(client: Any):
    answer = chat(client, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == POSITIONS and answer.choices[0].finish_reason == "length"
    assert len(complete(client, max_tokens=None).choices[0].text) <= 16


def test_penalties_and_biases(client: Any, engine: Seen):
    options = {"presence_penalty": 0.5, "frequency_penalty": 2.0, "logit_bias": {"65": 100}}
    assert set(complete(client, max_tokens=4, **options).choices[0].text) == {"A"}
    params = engine.params[-1]
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 2.0)
    assert params.logit_bias == {65: 100.0}
    extra = {"repetition_penalty": 100.0, "top_k": -1}
    assert len(set(complete(client, "B", max_tokens=9, extra_body=extra).choices[0].text)) > 1
    assert engine.params[-1].repetition_penalty == 100.0


def test_values_that_mean_off(client: Any):
    extra = {"top_k": -1, "repetition_penalty": 1.0, "min_p": 0.0, "ignore_eos": True}
    options: dict[str, Any] = {"n": 1, "presence_penalty": 0, "logit_bias": {}, "max_tokens": 3}
    options |= {"response_format": {"type": "text"}, "temperature": 0.0, "store": False}
    answer = chat(client, parallel_tool_calls=True, tools=[], extra_body=extra, **options)
    plain = chat(client, max_tokens=3, temperature=0.0, extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_in_a_schema(client: Any, temperature: float):
    options = {"temperature": temperature, "logit_bias": NO_SPACES, "seed": 2}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    answer = chat(client, response_format=given, **options)
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"ok", "kind"} and value["kind"] in ("cat", "dog")
    assert type(value["ok"]) is bool and answer.choices[0].finish_reason == "stop"
    # The stream of the same request, with the probabilities of what has a text.
    stream = chat(client, response_format=given, stream=True, logprobs=True, **options)
    pieces = [piece.choices[0] for piece in stream]
    assert json.loads("".join(piece.delta.content or "" for piece in pieces)) == value
    tokens = [entry.token for piece in pieces for entry in (piece.logprobs.content or [])]
    assert json.loads("".join(tokens)) == value


def test_answers_that_are_objects(client: Any):
    # The closing brace is wanted wherever it may stand.
    bias = NO_SPACES | {str(ord("}")): 100}
    answer = chat(client, response_format={"type": "json_object"}, logit_bias=bias)
    assert json.loads(answer.choices[0].message.content) == {}
    with pytest.raises(openai.BadRequestError, match="response_format.*uniqueItems"):
        schema = {"type": "array", "uniqueItems": True}
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat(client, response_format=given)


def test_messages_and_tools(client: Any, engine: Seen):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    chat(client, messages=messages, tools=[WEATHER], max_tokens=1)
    expected = "[weather]<system>Be kind.<userAnn>a\na<assistant>(3)<tool>warm<assistant>"
    assert engine.prompts[-1] == expected
    answer = chat(client, tools=[WEATHER], tool_choice="none", max_tokens=1)
    assert engine.prompts[-1] == "<user>Hi<assistant>"
    # The client's own object goes back as it is.
    again = [{"role": "user", "content": "Hi"}, answer.choices[0].message]
    assert chat(client, messages=again, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    "options, name",
    [
        ({"audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text"]}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(client: Any, options: dict[str, Any], name: str):
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        chat(client, **options)
    assert caught.value.param == name


def test_unsupported_parts_and_suffix_are_named(client: Any):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].type.*image_url"):
        chat(client, [image])
    with pytest.raises(openai.BadRequestError, match="suffix"):
        complete(client, suffix="x")


def test_metrics(client: Any, site: Site):
    def read() -> dict[str, float]:
        url = f"http://127.0.0.1:{site.port}/metrics"
        with urllib.request.urlopen(url) as response:
            assert response.headers["content-type"].startswith("text/plain; version=")
            families = prometheus.text_string_to_metric_families(response.read().decode())
        return {
            sample.name.removeprefix("flashinfer_serve_") + str(sample.labels.get("reason", "")): (
                sample.value
            )
            for family in families
            for sample in family.samples
        }

    complete(client, "abcd" * 5, max_tokens=1)  # fills pages that the next requests share
    before = read()
    complete(client, "abcd" * 5, max_tokens=7, n=2)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["prompt_tokens_total"] == 40 and grown["generation_tokens_total"] == 14
    assert grown["requests_totallength"] == 2
    assert grown["time_to_first_token_seconds_count"] == 2
    assert grown["inter_token_latency_seconds_count"] == 12
    assert after["kv_cache_pages"] == after["kv_cache_pages_free"] == 256
    assert after["requests_running"] == after["requests_waiting"] == 0
    assert after["prefix_cache_tokens_total"] > 0 and "speculation_drafted_tokens_total" in after
