"""Norms with gates and modulated layer norms, on the GPU."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import norm
from flashinfer.testing import assert_matches_reference, make_tensor

pytestmark = pytest.mark.gpu
# Fewer rows than CTAs, more, and the widest that the kernels take.
STREAMS = [(1, 8), (3, 8192), (700, 1024), (1500, 264), (400, 8192)]
VIDEOS = [(1, 5, 8), (2, 300, 3072), (3, 7, 6144), (2, 200, 264)]


def _stream(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> dict:
    def new(*shape: int, kind: torch.dtype = dtype, **options: int) -> torch.Tensor:
        return make_tensor(*shape, dtype=kind, device=device, **options)

    return {
        "branch": new(rows, hidden, row_stride=hidden + 8),
        "residual": new(rows, hidden, kind=torch.float32),
        "alpha": new(hidden, kind=torch.float32),
        "beta": new(hidden, kind=torch.float32),
        "weight": new(hidden),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", STREAMS, ids=str)
def test_gated_residual(shape, dtype, device):
    arguments = _stream(*shape, dtype, device)
    assert flashinfer.supports_gated_residual_rmsnorm(**arguments)
    for changed in ({}, {"weight": None}, {"gain_center": 1.0, "eps": 0.1}):
        assert_matches_reference(norm.gated_residual_rmsnorm, **arguments | changed)
    weight = arguments.pop("weight")
    arguments |= {"next_weight": weight, "next_gain_center": 1.0}
    for changed in ({}, {"post_weight": weight, "post_gain_center": 1.0}, {"alpha": 0.5}):
        assert_matches_reference(norm.gated_residual_next_rmsnorm, **arguments | changed)


def test_in_place_and_early_launch_change_no_bit(device):
    arguments = _stream(300, 4096, torch.bfloat16, device)
    usual = norm.gated_residual_rmsnorm(**arguments, enable_pdl=False)
    stream = arguments["residual"]
    assert torch.equal(norm.gated_residual_rmsnorm(**arguments, out=stream), usual)
    assert usual.data_ptr() != stream.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_sigmoid_gate(head_dim, dtype, device):
    assert flashinfer.supports_rmsnorm_sigmoid_gate(dtype, head_dim, device)
    for rows, heads in ((1, 1), (33, 5), (4000, 16)):
        wide = make_tensor(rows, heads * head_dim + 8, dtype=dtype, device=device)
        heads_of = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        gate = make_tensor(rows, heads, head_dim, dtype=dtype, device=device)
        padding = wide[:, heads * head_dim :].clone()
        assert_matches_reference(norm.rmsnorm_sigmoid_gate, input=heads_of, gate=gate)
        norm.rmsnorm_sigmoid_gate(heads_of, gate)
        assert torch.equal(wide[:, heads * head_dim :], padding)
        flat = make_tensor(rows, head_dim, dtype=dtype, device=device)
        assert_matches_reference(norm.rmsnorm_sigmoid_gate, input=flat, gate=gate[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", VIDEOS, ids=str)
def test_modulated_layernorm(shape, dtype, device):
    batch, rows, hidden = shape
    x, residual = (make_tensor(*shape, dtype=dtype, device=device) for _ in range(2))
    columns = [make_tensor(hidden, dtype=torch.float32, device=device) for _ in range(3)]
    parts = make_tensor(batch, rows, 6 * hidden, dtype=dtype, device=device).chunk(6, dim=2)
    gate, scale, shift = parts[:3]
    factor = torch.full((1,), 0.75, device=device)
    sums = {"input": x, "residual": residual, "gate": gate}
    affine = {**sums, "gamma": columns[0], "beta": columns[1]}
    for changed in ({}, {"gate_bias": columns[2], "input_global_scaling_factor": factor}):
        assert_matches_reference(
            norm.fused_dit_gate_residual_layernorm_gamma_beta, **affine | changed
        )
    moved = {"scale": scale, "shift": shift}
    biases = dict(zip(("gate_bias", "scale_bias", "shift_bias"), columns, strict=True))
    gated = norm.fused_dit_gate_residual_layernorm_scale_shift
    assert_matches_reference(gated, **sums, **moved)
    assert_matches_reference(gated, **sums, **moved, **biases)
    shared = {name: tensor[:, :1].expand(shape) for name, tensor in moved.items()}
    plain = norm.fused_dit_residual_layernorm_scale_shift
    assert_matches_reference(plain, input=x, **shared)
    assert_matches_reference(plain, input=x, residual=residual, **moved, scale_bias=columns[0])


def test_empty(device):
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    norm.rmsnorm_sigmoid_gate(empty, empty.clone())
    columns = torch.ones(64, device=device)
    stream = empty.float()
    assert norm.gated_residual_rmsnorm(empty, stream, None, columns, columns).shape == (0, 64)
