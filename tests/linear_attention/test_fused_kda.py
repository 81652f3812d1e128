"""A whole decode step of a KDA layer, against the layer over the whole sequence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashinfer import fused_kda_decode, packed_fused_kda_decode
from tests.bodies import body_of
from tests.linear_attention.recurrences import gated_delta_rule, relative_error

BF16 = torch.bfloat16
HEADS, DIM = 3, 64
CHANNELS = 3 * HEADS * DIM
EPS = 1e-5


class Layer:
    """Weights of a layer, and what it makes of the inputs of a sequence."""

    def __init__(self, device: torch.device, bound: float | None) -> None:
        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        self.device, self.bound = device, bound
        self.weights = {
            "weight": new(3, 4, HEADS * DIM) / 2,
            "A_log": new(HEADS),
            "dt_bias": new(HEADS * DIM),
            "norm_weight": new(DIM),
        }

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Activations of packed tokens; some are views of wider rows."""
        shapes = {
            "x": (tokens, CHANNELS),
            "raw_gate": (1, tokens, HEADS, DIM),
            "raw_beta": (1, tokens, HEADS),
            "output_gate": (tokens, HEADS, DIM),
        }
        made = {n: torch.randn(s, device=self.device).to(BF16) for n, s in shapes.items()}
        wide = torch.randn(1, tokens, HEADS + 2, device=self.device).to(BF16)
        return {**made, "raw_beta": wide[:, :, :HEADS]}

    def caches(self, slots: int, length: int) -> dict[str, torch.Tensor]:
        """Pools with the channels of an input side by side; unused slots hold NaN."""
        rows = torch.full((slots, length, CHANNELS), float("nan"), dtype=BF16, device=self.device)
        state = torch.full((slots, HEADS, DIM, DIM), float("nan"), device=self.device)
        return {"conv_state": rows.transpose(1, 2), "state": state}

    def outputs(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """All tokens of one sequence, from nothing: [tokens, heads, dim]."""
        taps = self.weights["weight"].double().transpose(1, 2).reshape(CHANNELS, 1, 4)
        padded = F.pad(inputs["x"].double().T, (3, 0))
        mixed = F.silu(F.conv1d(padded, taps, groups=CHANNELS)).T
        q, k, v = mixed.view(-1, 3, HEADS, DIM).unbind(1)
        shifted = inputs["raw_gate"][0].double() + self.weights["dt_bias"].double().view(HEADS, DIM)
        rate = self.weights["A_log"].double().exp()[:, None]
        log = -rate * F.softplus(shifted)
        if self.bound is not None:
            log = self.bound * torch.sigmoid(rate * shifted)
        beta, start = torch.sigmoid(inputs["raw_beta"][0].double()), q.new_zeros(HEADS, DIM, DIM)
        out, _ = gated_delta_rule(q, k, v, log.exp(), beta, start, DIM**-0.5, True)
        normed = F.rms_norm(out, (DIM,), self.weights["norm_weight"].double(), EPS)
        return normed * torch.sigmoid(inputs["output_gate"].double())


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Inputs of several packed parts, one after the other."""
    along = {"x": 0, "output_gate": 0, "raw_gate": 1, "raw_beta": 1}
    return {n: torch.cat([part[n] for part in parts], axis) for n, axis in along.items()}


def cut(inputs: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
    return {n: x[part] if n in ("x", "output_gate") else x[:, part] for n, x in inputs.items()}


@pytest.mark.parametrize("function", [fused_kda_decode, body_of], ids=["called", "body"])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_tokens_one_by_one(device: torch.device, bound: float | None, function: Any) -> None:
    """Five steps of three sequences and one padding row are five tokens of each sequence."""
    torch.manual_seed(0)
    function = body_of(fused_kda_decode) if function is body_of else function
    layer = Layer(device, bound)
    caches = layer.caches(6, 3)
    slots = torch.tensor([4, 1, 0, 3], dtype=torch.int32, device=device)
    for cache in caches.values():
        cache[slots[slots > 0].long()] = 0.0
    seen: list[dict[str, torch.Tensor]] = []
    for _ in range(5):
        seen.append(layer.inputs(4))
        found = torch.full((1, 4, HEADS, DIM), float("nan"), dtype=BF16, device=device)
        returned = function(
            **seen[-1], **layer.weights, **caches, state_indices=slots, lower_bound=bound,
            norm_eps=EPS, output=found,
        )  # fmt: skip
        assert returned is found and not found[0, 2].any()
        for row in (0, 1, 3):
            wanted = layer.outputs(joined([cut(part, slice(row, row + 1)) for part in seen]))[-1]
            assert relative_error(found[0, row], wanted) < 2e-2
    for cache in caches.values():  # the null slot, and slots of nobody
        assert cache[[0, 2, 5]].isnan().all() and cache[slots[slots > 0].long()].isfinite().all()


@pytest.mark.parametrize("function", [packed_fused_kda_decode, body_of], ids=["called", "body"])
def test_drafts(device: torch.device, function: Any) -> None:
    """Rounds of drafts of which some tokens count: as if only these had ever been there."""
    torch.manual_seed(1)
    function = body_of(packed_fused_kda_decode) if function is body_of else function
    layer, most = Layer(device, -5.0), 3
    caches = layer.caches(14, most + 2)
    slots = torch.tensor([[5, 2, 9], [0, 1, 1], [3, 8, 7], [12, 11, 4]], device=device)
    for cache in caches.values():
        cache[slots[[0, 2, 3]].flatten()] = 0.0
    counted: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(4)]
    accepted = [1, 1, 1, 1]
    for lengths, next_accepted in (([3, 1, 2, 3], [2, 1, 1, 3]), ([3, 2, 3, 1], [3, 1, 2, 1]),
                                   ([1, 3, 3, 0], [1, 1, 1, 1])):  # fmt: skip
        bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        inputs = layer.inputs(sum(lengths) + 1)  # and a token of no sequence
        found = function(
            **inputs, **layer.weights, **caches, state_indices=slots, norm_eps=EPS,
            query_start_loc=bounds, num_accepted_tokens=torch.tensor(accepted, device=device).int(),
        )  # fmt: skip
        assert not found[0, -1].any() and not found[0, bounds[1] : bounds[2]].any()
        for i in (0, 2, 3):
            part = cut(inputs, slice(int(bounds[i]), int(bounds[i + 1])))
            if lengths[i] == 0:
                continue
            wanted = layer.outputs(joined([*counted[i], part]))[-lengths[i] :]
            assert relative_error(found[0, bounds[i] : bounds[i + 1]], wanted) < 2e-2
            counted[i].append(cut(part, slice(next_accepted[i])))
        accepted = next_accepted
    assert caches["state"][[0, 1, 6, 10, 13]].isnan().all()


def test_refusals(device: torch.device) -> None:
    layer = Layer(device, -5.0)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    call = {**layer.inputs(2), **layer.weights, **layer.caches(4, 3), "state_indices": slots}
    for function in (fused_kda_decode, body_of(fused_kda_decode)):
        for name, wrong in {
            "x": call["x"].double(),
            "weight": call["weight"][:, :3],
            "conv_state": call["conv_state"][..., :2],
            "raw_gate": call["raw_gate"][:, :1],
            "raw_beta": call["raw_beta"][0],
            "dt_bias": call["dt_bias"][1:],
            "state": call["state"][..., 1:],
            "output_gate": call["output_gate"][:, :1],
            "norm_weight": call["norm_weight"][1:],
            "state_indices": slots.float(),
            "lower_bound": 1.0,
            "backend": "cake",
            "state_indices_mode": "repeated_positive",
        }.items():
            expected = REFUSED_AS.get(name, name)
            with pytest.raises((TypeError, ValueError), match=expected):
                function(**{**call, name: wrong})
                pytest.fail(f"{name} was accepted")


# Another argument tells the shape that this one breaks.
REFUSED_AS = {
    "x": "x|conv_state", "state": "state|head_dim", "output_gate": "output_gate|raw_gate",
    "raw_gate": "raw_gate|raw_beta", "weight": "weight|width",
}  # fmt: skip
