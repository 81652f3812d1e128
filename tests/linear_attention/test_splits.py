"""States carried from call to call: a sequence that is cut at every position stays what it is.

All first parts are the sequences of one call and all second parts those of the next, which begins
with the states that the first one left. So are decode steps that go on where prompts ended.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.kda import recurrent_kda
from flashinfer.mamba import selective_state_update, ssd_combined_fwd
from tests.linear_attention.drawing import bounds_of
from tests.linear_attention.recurrences import (
    STORAGE_ERROR,
    gated_delta_rule,
    relative_error,
    selective_state,
)

BF16 = torch.bfloat16
TOKENS, DIM = 70, 64  # a chunk and a few tokens more
CUTS = range(TOKENS + 1)
CHUNK_ERROR = 6e-3  # products in chunks have operands of bfloat16
DECODED = 3  # tokens after each prompt


def first_parts(tensor: torch.Tensor, cuts: range = CUTS) -> torch.Tensor:
    """The tokens before each cut, one part after the other."""
    return torch.cat([tensor[:cut] for cut in cuts])


def second_parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[cut:] for cut in CUTS])


def check_parts(
    outputs: tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    expected: tuple[torch.Tensor, list[torch.Tensor]],
    bound: float,
) -> None:
    """Both parts of every cut are the whole sequence's outputs, and the state is its last one."""
    first, second = (
        part.split([cut if i == 0 else TOKENS - cut for cut in CUTS])
        for i, part in enumerate(outputs)
    )
    for cut in CUTS:
        whole = torch.cat([first[cut], second[cut]])
        assert relative_error(whole, expected[0]) < bound, f"cut before token {cut}"
        assert relative_error(states[cut], expected[1][-1]) < bound, f"cut before token {cut}"


class Rule:
    """One sequence of the delta rule with gates as decode takes them."""

    def __init__(self, device: torch.device) -> None:
        heads = 2

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        self.q, self.k, self.v = (new(TOKENS, heads, DIM).to(BF16) for _ in "qkv")
        self.a, self.b = (new(TOKENS, heads).to(BF16) for _ in "ab")
        self.A_log, self.dt_bias = new(heads), new(heads)
        self.state = new(heads, DIM, DIM)

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        step = F.softplus(self.a.double() + self.dt_bias.double())
        decay = torch.exp(-self.A_log.double().exp() * step)
        return decay.float(), torch.sigmoid(self.b.double()).float()

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        gates = self.gates()
        return gated_delta_rule(self.q, self.k, self.v, *gates, self.state, DIM**-0.5, True)


def test_prefill_of_the_delta_rule(device):
    rule = Rule(device)
    tensors = (rule.q, rule.k, rule.v, *rule.gates())
    states, outputs = rule.state.expand(len(CUTS), -1, -1, -1).contiguous(), []
    for parts, lengths in ((first_parts, list(CUTS)), (second_parts, [TOKENS - c for c in CUTS])):
        out, states = chunk_gated_delta_rule(
            *(parts(tensor) for tensor in tensors),
            initial_state=states,
            output_final_state=True,
            cu_seqlens=bounds_of(lengths, torch.int64, device),
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(out)
    check_parts((outputs[0], outputs[1]), states, rule.expected(), CHUNK_ERROR)


def test_decode_continues_prompts_of_every_length(device):
    rule = Rule(device)
    cuts = range(TOKENS - DECODED + 1)
    _, states = chunk_gated_delta_rule(
        *(first_parts(tensor, cuts) for tensor in (rule.q, rule.k, rule.v, *rule.gates())),
        initial_state=rule.state.expand(len(cuts), -1, -1, -1).contiguous(),
        output_final_state=True,
        cu_seqlens=bounds_of(list(cuts), torch.int32, device),
        use_qk_l2norm_in_kernel=True,
    )
    outputs, after = rule.expected()
    for t in range(DECODED):

        def token(tensor: torch.Tensor, t: int = t) -> torch.Tensor:
            return tensor[t : t + len(cuts), None]

        out, states = gated_delta_rule_decode_pretranspose(
            token(rule.q), token(rule.k), token(rule.v), states, rule.A_log, token(rule.a),
            rule.dt_bias, token(rule.b),
        )  # fmt: skip
        assert relative_error(out[:, 0], outputs[t : t + len(cuts)]) < CHUNK_ERROR
    for cut in cuts:
        assert relative_error(states[cut], after[cut + DECODED - 1]) < CHUNK_ERROR


@pytest.mark.parametrize("form", ["softplus", "bounded"])
def test_kda(device, form):
    rule = Rule(device)
    g, dt_bias = torch.randn_like(rule.k), torch.randn(2, DIM, device=device)
    bound = -5.0 if form == "bounded" else None
    rate, shifted = rule.A_log.double().exp()[:, None], g.double() + dt_bias.double()
    logarithm = -rate * F.softplus(shifted)
    if bound is not None:
        logarithm = bound * torch.sigmoid(rate * shifted)
    expected = gated_delta_rule(
        rule.q, rule.k, rule.v, logarithm.exp(), torch.sigmoid(rule.b.double()), rule.state,
        DIM**-0.5, True,
    )  # fmt: skip
    states, outputs = rule.state.expand(len(CUTS), -1, -1, -1).contiguous(), []
    for parts, lengths in ((first_parts, list(CUTS)), (second_parts, [TOKENS - c for c in CUTS])):
        out, _ = recurrent_kda(
            *(parts(tensor)[None] for tensor in (rule.q, rule.k, rule.v, g, rule.b)),
            rule.A_log,
            dt_bias,
            initial_state=states,
            use_gate_in_kernel=True,
            lower_bound=bound,
            beta_is_logit=True,
            cu_seqlens=bounds_of(lengths, torch.int64, device),
        )
        outputs.append(out[0])
    check_parts((outputs[0], outputs[1]), states, expected, 1.5 * STORAGE_ERROR[BF16])


class Mamba:
    """One sequence of Mamba-2: inputs by token, and weights."""

    def __init__(self, device: torch.device) -> None:
        heads = 2

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        self.tokens = {
            "x": new(1, TOKENS, heads, DIM).to(BF16),
            "dt": new(1, TOKENS, heads).to(BF16),
            "B": new(1, TOKENS, 1, DIM).to(BF16),
            "C": new(1, TOKENS, 1, DIM).to(BF16),
            "z": new(1, TOKENS, heads, DIM).to(BF16),
        }
        self.A, self.D, self.dt_bias = -new(heads).abs(), new(heads), new(heads)
        self.state = new(1, heads, DIM, DIM)

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, dt, B, C, z = (tensor[0] for tensor in self.tokens.values())
        step = F.softplus(dt.double() + self.dt_bias.double())[..., None].expand(x.shape)
        A, D = self.A[:, None, None], self.D[:, None]
        return selective_state(x, step, A, B, C, D, z, self.state[0])

    def prefill(self, part: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, final = ssd_combined_fwd(
            A=self.A, D=self.D, dt_bias=self.dt_bias, dt_softplus=True, initial_states=state,
            **{name: tensor[:, part] for name, tensor in self.tokens.items()},
        )  # fmt: skip
        assert final is not None
        return out[0], final

    def decode(self, t: int, state: torch.Tensor) -> torch.Tensor:
        """The output of token t; the state is overwritten."""
        row = {name: tensor[:, t] for name, tensor in self.tokens.items()}
        heads = self.state.shape[1]
        out: torch.Tensor = selective_state_update(
            state,
            **{**row, "dt": row["dt"][..., None].expand(1, heads, DIM)},
            A=self.A[:, None, None].expand(heads, DIM, DIM),
            D=self.D[:, None].expand(heads, DIM),
            dt_bias=self.dt_bias[:, None].expand(heads, DIM),
            dt_softplus=True,
        )
        return out[0]


def test_prefill_of_mamba(device):
    mamba, halves = Mamba(device), []
    for cut in CUTS:
        first, state = mamba.prefill(slice(0, cut), mamba.state)
        second, state = mamba.prefill(slice(cut, TOKENS), state)
        halves.append((first, second, state[0]))
    first, second, states = zip(*halves, strict=True)
    outputs = torch.cat(first), torch.cat(second)
    check_parts(outputs, torch.stack(states), mamba.expected(), CHUNK_ERROR)


def test_decode_continues_mamba_at_every_length(device):
    mamba = Mamba(device)
    outputs, after = mamba.expected()
    for cut in range(TOKENS - DECODED + 1):
        _, state = mamba.prefill(slice(0, cut), mamba.state)
        for t in range(cut, cut + DECODED):
            assert relative_error(mamba.decode(t, state), outputs[t]) < 2 * CHUNK_ERROR
        assert relative_error(state[0], after[cut + DECODED - 1]) < CHUNK_ERROR
