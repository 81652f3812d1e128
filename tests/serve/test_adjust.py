"""Penalties, biases, grammars and log-probabilities, against sums written out here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import flashinfer
from examples.serve.adjust import Adjustment, adjust, unpacked
from examples.serve.engine import Engine, Output, SamplingParams
from examples.serve.model import Model
from examples.serve.tokens import BYTE_LEVEL_EOS, ByteTokenizer
from tests.serve.models import Reference

VOCABULARY = 50


def _penalized(logits: torch.Tensor, params: SamplingParams, prompt: list[int], drawn: list[int]):
    """One token after the other, in float64."""
    result = logits.double().clone()
    for token in range(len(logits)):
        count = drawn.count(token)
        if count or token in prompt:
            penalty = params.repetition_penalty
            result[token] *= penalty if result[token] < 0 else 1 / penalty
        result[token] -= params.frequency_penalty * count
        result[token] -= params.presence_penalty * (count > 0)
        result[token] += params.logit_bias.get(token, 0.0)
    return result


def test_penalties_and_biases():
    generator = torch.Generator().manual_seed(1)
    asked = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.5, frequency_penalty=-0.3),
        SamplingParams(),
        SamplingParams(logit_bias={3: 5.0, 49: -100.0}),
        SamplingParams(repetition_penalty=0.6, frequency_penalty=1.1, logit_bias={0: 2.5}),
    ]
    logits = 3 * torch.randn(len(asked), VOCABULARY, generator=generator)
    before = logits.clone()
    prompts = [[1, 1, 3], [4], [5], [6], list(range(20))]
    drawn = [torch.randint(8, (12,), generator=generator).tolist() for _ in asked]
    adjustments = []
    for params, prompt, tokens in zip(asked, prompts, drawn, strict=True):
        one = Adjustment(params, prompt, VOCABULARY, logits.device) if params.adjusts else None
        for token in tokens if one else []:
            one.count(torch.tensor([token]))
        adjustments.append(one)
    got = adjust(logits, adjustments)
    assert torch.equal(logits, before)
    for row, (params, prompt, tokens) in enumerate(zip(asked, prompts, drawn, strict=True)):
        expected = _penalized(logits[row], params, prompt, tokens)
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-6, atol=1e-5)
    assert adjust(logits, [None] * len(asked)) is logits


@pytest.mark.parametrize("size", [1, 8, 31, 257, 300])
def test_masks_are_as_packbits_packs_them(size: int):
    allowed = torch.rand(3, size, generator=torch.Generator().manual_seed(size)) < 0.5
    with flashinfer.reference_backend():
        words = torch.stack([flashinfer.packbits(row, bitorder="little") for row in allowed])
    assert torch.equal(unpacked(words, size), allowed)
    assert torch.equal(unpacked(words, size + 40)[:, size:], torch.zeros(3, 40, dtype=torch.bool))


def _serve(model: Model, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[Output]]:
    engine = Engine(model, ByteTokenizer(), num_pages=40, page_size=4, max_batch_tokens=64)
    outputs: dict[str, list[Output]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(**{"ignore_eos": True, **params}))
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert engine.stats()["pages_free"] == 40
    return outputs


@pytest.mark.parametrize("options", [{"frequency_penalty": 100.0}, {"presence_penalty": 100.0}])
def test_penalized_tokens_do_not_come_again(model: Model, options: dict[str, float]):
    """Steps launched ahead count the tokens that the host does not know yet."""
    outputs = _serve(model, {"a": [1, 2], "b": [3]}, temperature=0.0, max_tokens=40, **options)
    for got in outputs.values():
        assert len({output.token_id for output in got}) == 40


def test_bias_decides(model: Model):
    (got,) = _serve(model, {"a": [1]}, max_tokens=5, logit_bias={77: 1000.0}).values()
    assert [output.token_id for output in got] == [77] * 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    pytest.importorskip("transformers")
    from examples.serve import checkpoint

    folder = tmp_path_factory.mktemp("logprobs")
    checkpoint.write_random_checkpoint(folder, {**checkpoint.SMALL, "num_hidden_layers": 1})
    return Reference(folder)


def test_log_probabilities_are_those_of_the_model(reference: Reference):
    from examples.serve import checkpoint

    model, _ = checkpoint.load(reference.folder, "cpu")
    prompts = {"long": list(range(90)), "short": [7]}
    outputs = _serve(
        model, prompts, max_tokens=4, seed=1, logprobs=3, prompt_logprobs=2, logit_bias={9: 3.0}
    )
    for name, prompt in prompts.items():
        tokens = [*prompt, *(output.token_id for output in outputs[name])]
        expected = reference.logits(tokens).log_softmax(-1)
        first, *scores = outputs[name][0].prompt_logprobs or []
        assert first is None and len(scores) == len(prompt) - 1
        entries = [*scores, *(output.logprobs for output in outputs[name])]
        for position, entry in enumerate(entries):
            assert entry is not None and entry.token_id == tokens[position + 1]
            row = expected[position]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=0.1)
            assert len(entry.top) == (2 if position < len(prompt) - 1 else 3)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            best = row.topk(len(values)).values.tolist()
            assert values == pytest.approx(best, abs=0.1)
            assert [float(row[token]) for token, _ in entry.top] == pytest.approx(values, abs=0.1)
        assert all(output.prompt_logprobs is None for output in outputs[name][1:])


def test_prompts_are_scored_once_despite_preemption_and_shared_pages(model: Model):
    """Each prompt is longer than a step; the pages of one are not enough for the other."""
    engine = Engine(model, None, num_pages=20, page_size=4, max_batch_size=4, max_batch_tokens=16)
    params = SamplingParams(max_tokens=24, prompt_logprobs=0, ignore_eos=True, temperature=0.0)
    prompts = {str(n): [(n // 2 + 3 * i) % 256 for i in range(30)] for n in range(4)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    scores: dict[str, list] = {}
    while engine.has_work:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                assert output.request_id not in scores
                scores[output.request_id] = output.prompt_logprobs
    for name, prompt in prompts.items():
        assert [entry.token_id for entry in scores[name][1:]] == prompt[1:]
    for one, other in (("0", "1"), ("2", "3")):
        values = [[entry.logprob for entry in scores[name][1:]] for name in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=0.05)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def _check_animal(text: str) -> None:
    value = json.loads(text)
    assert set(value) == set(SCHEMA["properties"])
    assert isinstance(value["name"], str) and len(value["name"]) <= 3
    assert type(value["age"]) is int and 0 <= value["age"] <= 999
    assert value["kind"] in ("cat", "dog") and len(value["tags"]) <= 2
    assert all(type(tag) is bool for tag in value["tags"])


def test_answers_follow_a_schema(model: Model):
    """Of random weights, at any temperature, with guesses, beside requests that follow none."""
    pytest.importorskip("llguidance")
    from examples.serve.grammar import Grammars

    grammar = Grammars(ByteTokenizer(), [BYTE_LEVEL_EOS], 257).json(SCHEMA)
    engine = Engine(model, ByteTokenizer(), num_pages=200, page_size=4, speculation=3, ngram=1)
    for number in range(3):
        # Spaces are allowed between any two values, and these weights know no reason to stop.
        params = SamplingParams(
            temperature=0.7 * number, seed=number, max_tokens=None, grammar=grammar,
            logit_bias={ord(space): -100.0 for space in " \n"},
        )  # fmt: skip
        engine.add_request(f"schema {number}", "x", params)
    engine.add_request("free", "x", SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    texts: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            if output.finished:
                assert output.reason == ("length" if output.request_id == "free" else "stop")
    for number in range(3):
        _check_animal(texts[f"schema {number}"])
    assert engine.stats()["pages_free"] == 200


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "nosuch"}, "nosuch"),
        ({"type": "string", "pattern": "(("}, "regex"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"enum": ["x" * 70000]}, "65536 bytes"),
    ],
    ids=["type", "pattern", "keyword", "size"],
)
def test_schemas_that_cannot_be_followed(schema: dict, message: str):
    pytest.importorskip("llguidance")
    from examples.serve.grammar import GrammarError, Grammars

    with pytest.raises(GrammarError, match=message):
        Grammars(ByteTokenizer(), [BYTE_LEVEL_EOS], 257).json(schema)


def test_a_grammar_that_fails_ends_its_request_alone(model: Model):
    from examples.serve.grammar import GrammarError

    class Broken:
        def start(self) -> Broken:
            return self

        def allowed(self) -> torch.Tensor:
            return torch.full((33,), 255, dtype=torch.uint8)

        def accept(self, token: int) -> None:
            raise GrammarError("too complex")

    engine = Engine(model, None, num_pages=40)
    engine.add_request("broken", [1], SamplingParams(grammar=Broken()))  # type: ignore[arg-type]
    engine.add_request("good", [1], SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (broken,) = [output for output in outputs if output.request_id == "broken"]
    assert (broken.finished, broken.reason, broken.error) == (True, "error", "too complex")
    assert len(outputs) == 4 and engine.stats()["pages_free"] == 40
