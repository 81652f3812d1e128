"""Fixtures that the tests of the engine share."""

from __future__ import annotations

import pytest
import torch

from examples.serve import checkpoint
from examples.serve.model import Model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The smallest one, of random weights: one layer, 128 positions."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = {**checkpoint.SMALL, **shape, "max_position_embeddings": 128}
    folder = checkpoint.write_random_checkpoint(tmp_path_factory.mktemp("small"), config)
    return checkpoint.load(folder, "cuda" if torch.cuda.is_available() else "cpu")[0]
