"""The check of greedy tokens: agrees with two references, and notices a wrong engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from examples.serve import check, checkpoint, engine

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("importable", [True, False])
def test_agrees(importable: bool, monkeypatch: pytest.MonkeyPatch):
    if importable:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    result = check.check_greedy(DEVICE, prompts=2, tokens=6)
    assert result.holds and result.tokens == 12 and result.equal >= 10
    assert ("not importable" in result.against) == (not importable)
    assert str(result).endswith("agrees")


def test_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch):
    def second_best(logits, params, seeds, drawn):
        return logits.topk(2).indices[:, 1].int()

    monkeypatch.setattr(engine, "sample", second_best)
    result = check.check_greedy(DEVICE, prompts=2, tokens=6)
    assert not result.holds and result.equal < 6 and str(result).endswith("DIFFERS")


def test_both_references_give_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    folder = checkpoint.write_random_checkpoint(tmp_path)
    tokens = list(range(40))
    first = check.reference(folder)[1](tokens)
    monkeypatch.setitem(sys.modules, "transformers", None)
    second = check.reference(folder)[1](tokens)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
