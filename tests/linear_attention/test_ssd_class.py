"""`SSDCombined`: `ssd_combined_fwd` for calls of one form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.mamba import SSDCombined, ssd_combined_fwd

BF16, FP32 = torch.bfloat16, torch.float32
HEADS, DIM, DSTATE, GROUPS, TOKENS = 4, 64, 64, 2, 9
SIZES = {"chunk_size": 128, "nheads": HEADS, "headdim": DIM, "dstate": DSTATE, "ngroups": GROUPS}


def call(device: torch.device) -> dict[str, Any]:
    """Two sequences, with D, z and initial states."""

    def new(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return {
        "x": new(2, TOKENS, HEADS, DIM, dtype=BF16),
        "dt": new(2, TOKENS, HEADS),
        "A": -new(HEADS).abs(),
        "B": new(2, TOKENS, GROUPS, DSTATE, dtype=BF16),
        "C": new(2, TOKENS, GROUPS, DSTATE, dtype=BF16),
        "D": new(HEADS),
        "z": new(2, TOKENS, HEADS, DIM, dtype=BF16),
        "dt_softplus": True,
        "initial_states": new(2, HEADS, DIM, DSTATE),
    }


WHOLE = {"state_dtype": FP32, "has_initial_states": True, "has_z": True}


def test_it_is_the_function(device):
    arguments = call(device)
    found = SSDCombined(**SIZES, **WHOLE).run(**arguments)
    wanted = ssd_combined_fwd(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_states_have_the_dtype_of_the_constructor(device):
    arguments = {**call(device), "initial_states": None, "z": None}
    out, states = SSDCombined(**SIZES).run(**arguments)
    wanted, exact = ssd_combined_fwd(**arguments)
    assert torch.equal(out, wanted) and torch.equal(states, exact.bfloat16())
    assert SSDCombined(**SIZES).run(**arguments, return_final_states=False)[1] is None


def test_chunks_of_sequences(device):
    """Sequences of 5, 0 and 6 tokens in chunks of 4: their borders begin logical chunks."""
    seq_idx = torch.tensor([[0] * 5 + [2] * 6], device=device)
    indices, offsets = (
        torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 1, 1, 2], [0, 0, 1, 0])
    )
    out = torch.full((4,), -1, dtype=torch.int32, device=device)
    scratch = torch.empty(SSDCombined.tile_state_size(3), device=device)
    found = SSDCombined(**SIZES).compute_seq_chunk_cumsum(
        seq_idx, indices, offsets, 4, 3, out, scratch
    )
    assert found is out and found.tolist() == [0, 2, 2, 4]
    assert SSDCombined.compute_seq_chunk_cumsum(seq_idx, indices, offsets, 4, 3).tolist() == [
        0, 2, 2, 4,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="chunk_offsets"):
        SSDCombined.compute_seq_chunk_cumsum(seq_idx, indices, offsets[:2], 4, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", 0), ("ngroups", 3), ("io_dtype", FP32), ("state_dtype", torch.int8),
        ("d_has_hdim", True), ("seq_idx_dtype", FP32), ("backend", "another"), ("nheads", 2.0),
    ],
)  # fmt: skip
def test_what_the_constructor_refuses(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        SSDCombined(**{**SIZES, **WHOLE, name: value})


def test_calls_of_another_form(device):
    arguments, layer = call(device), SSDCombined(**SIZES, **WHOLE)
    for name, wrong in {
        "x": arguments["x"][:, :, :2],
        "B": arguments["B"].half(),
        "C": arguments["C"][:, :, :1],
        "D": None,
        "z": None,
        "initial_states": arguments["initial_states"].bfloat16(),
        "seq_idx": torch.zeros(1, TOKENS, dtype=torch.int64, device=device),
        "out": arguments["x"].half(),
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            layer.run(**{**arguments, name: wrong})
