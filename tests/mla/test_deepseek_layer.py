"""One layer of DeepSeek V3 token by token against `transformers`: prefill, chunks, decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.mla.batches import BF16, indptr, make_wrapper, need_hopper

HEADS, HIDDEN, PAGE = 8, 256, 64
NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512


def modeling() -> Any:
    """Imported when a test runs: every collection would pay the seconds that the import takes."""
    return pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def make_layer(device: torch.device) -> tuple[Any, Any]:
    from transformers.models.deepseek_v3 import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=96,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    layer = modeling().DeepseekV3Attention(config, 0).to(device).float()
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer, modeling().DeepseekV3RotaryEmbedding(config).to(device)


class LatentLayer:
    """The same layer in its absorbed form: projections by PyTorch, attention by the wrapper."""

    def __init__(self, layer: Any, rotary: Any, device: torch.device) -> None:
        self.layer, self.rotary, self.device = layer, rotary, device
        self.wrapper = make_wrapper(device)
        self.cache = torch.full((8, PAGE, RANK + ROPE), float("nan"), dtype=BF16, device=device)
        self.pages = torch.tensor([5, 0, 7, 2, 1, 3, 6, 4], dtype=torch.int32, device=device)
        self.length = 0
        up = layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, RANK)
        self.up_keys, self.up_values = up[:, :NOPE], up[:, NOPE:]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        layer, tokens = self.layer, len(hidden)
        positions = torch.arange(self.length, self.length + tokens, device=self.device)
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        q_nope, q_pe = q.view(tokens, HEADS, NOPE + ROPE).split([NOPE, ROPE], -1)
        ckv, kpe = layer.kv_a_proj_with_mqa(hidden).split([RANK, ROPE], -1)
        ckv = layer.kv_a_layernorm(ckv)
        cosine, sine = self.rotary(hidden[None], positions[None])
        q_pe, kpe = modeling().apply_rotary_pos_emb_interleave(
            q_pe.transpose(0, 1)[None], kpe[None, None], cosine, sine
        )
        self.length += tokens
        row = torch.cat([ckv, kpe[0, 0]], -1).to(BF16)
        self.cache[self.pages[positions // PAGE].long(), positions % PAGE] = row
        absorbed = torch.einsum("thn,hnr->thr", q_nope, self.up_keys).to(BF16)
        used = -(-self.length // PAGE)
        self.wrapper.plan(
            *(indptr([tokens]), indptr([used]), self.pages),
            torch.tensor([self.length], dtype=torch.int32),
            *(HEADS, RANK, ROPE, PAGE, True, layer.scaling, BF16, BF16),
        )
        latent = self.wrapper.run(
            absorbed,
            q_pe[0].transpose(0, 1).to(BF16),
            self.cache[..., :RANK],
            self.cache[..., RANK:],
        )
        values = torch.einsum("thr,hvr->thv", latent.float(), self.up_values)
        return layer.o_proj(values.reshape(tokens, -1))


def expected_outputs(layer: Any, rotary: Any, hidden: torch.Tensor) -> torch.Tensor:
    tokens = len(hidden)
    positions = torch.arange(tokens, device=hidden.device)
    mask = torch.full((tokens, tokens), float("-inf"), device=hidden.device).triu(1)
    embeddings = rotary(hidden[None], positions[None])
    return layer(hidden[None], embeddings, mask[None, None])[0][0]


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(200,), (70, 64, 66), (1, 127, 72)], ids=str)
def test_against_transformers(chunks: tuple[int, ...], device: torch.device):
    need_hopper(device)
    layer, rotary = make_layer(device)
    hidden = torch.randn(sum(chunks) + 32, HIDDEN, device=device)
    expected = expected_outputs(layer, rotary, hidden)
    ours = LatentLayer(layer, rotary, device)
    outputs = [ours(part) for part in hidden.split([*chunks, *(1,) * 32])]
    actual = torch.cat(outputs)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Queries, latent rows, weights and outputs are rounded to bfloat16 once each.
    assert float(error.max()) < 0.02, f"token {int(error.argmax())}: {float(error.max()):.4f}"
