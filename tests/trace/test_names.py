"""The names and entries that code written for FlashInfer's traces reads."""

from __future__ import annotations

import json

import torch

import flashinfer
from flashinfer.api_logging import _TRACE_REGISTRY
from flashinfer.trace import default_check
from flashinfer.trace.template import Const, Tensor, TraceTemplate, Var
from flashinfer.trace.templates.norm import rmsnorm_trace


def test_the_words_of_a_template_come_with_it():
    axes = {"n": Var("Rows."), "h": Const("Elements.")}
    template = TraceTemplate("copy", axes, {"x": Tensor(["n", "h"])}, {})
    assert template.check is default_check


def test_a_template_without_a_check_of_its_own_compares_by_dtype():
    reference = torch.ones(4, 8, dtype=torch.bfloat16)
    assert rmsnorm_trace.check([reference], [reference + 5e-4])
    assert not rmsnorm_trace.check([reference], [reference + 0.5])


def test_the_registry_has_templates_with_labels():
    labels = [label for _, _, label in _TRACE_REGISTRY]
    assert all(isinstance(template, TraceTemplate) for _, template, _ in _TRACE_REGISTRY)
    assert "rmsnorm" in labels and "sampling_from_probs[sampling_from_probs_valid]" in labels
    pairs = [(function, id(template)) for function, template, _ in _TRACE_REGISTRY]
    assert len(set(pairs)) == len(pairs)


def test_a_definition_goes_to_the_folder_that_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP_DIR", str(tmp_path))
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    definition = flashinfer.rmsnorm.fi_trace(input=x, weight=x[0])
    path = tmp_path / f"{definition['name']}.json"
    assert json.loads(path.read_text()) == definition
    other = tmp_path / "other"
    flashinfer.rmsnorm.fi_trace(save_dir=other, input=x, weight=x[0])
    assert (other / path.name).exists()
