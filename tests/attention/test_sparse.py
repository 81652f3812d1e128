"""Block-sparse attention against dense attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.sparse import convert_bsr_mask_layout
from flashinfer.trace.templates.attention_arguments import problem_arguments
from flashinfer.trace.templates.attention_reference import _paged_attention_reference
from flashinfer.trace.templates.sparse import block_sparse_attention_run_trace
from tests.attention.batches import BF16, E4M3, FP16, check, randn, workspace


def random_bsr(
    rows: int, columns: int, density: float, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(rows, columns, generator=generator) < density
    indptr = torch.nn.functional.pad(blocks.sum(1).cumsum(0), (1, 0))
    return indptr.to(torch.int32), blocks.nonzero()[:, 1].to(torch.int32)


def plan_bsr(
    sizes: tuple[int, int, int, int],
    device: torch.device,
    *,
    density: float = 0.4,
    heads: tuple[int, int, int] = (8, 2, 128),
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    o_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A planned wrapper and the tensors of a run; `sizes`: M, N, R, C."""
    M, N, R, C = sizes
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device), backend)
    indptr, indices = random_bsr(M // R, N // C, density)
    if options.get("mask") is True:
        generator = torch.Generator().manual_seed(1)
        options["mask"] = torch.rand(len(indices), R, C, generator=generator).to(device) < 0.6
    dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype, "o_data_type": o_dtype or dtype}
    wrapper.plan(indptr, indices, *sizes, *heads, **dtypes, **options)
    q = randn((M, heads[0], heads[2]), dtype, device, 1)
    k, v = (randn((N, heads[1], heads[2]), kv_dtype or dtype, device, seed) for seed in (2, 3))
    return wrapper, {"q": q, "k": k, "v": v}


def check_bsr(wrapper: Any, tensors: dict[str, torch.Tensor]) -> None:
    check(type(wrapper).run, self=wrapper, return_lse=True, **tensors)


SHAPES = [
    (64, 256, 16, 16),
    (128, 128, 128, 64),
    (12, 40, 1, 8),
    (33, 35, 3, 5),
    (7, 7, 1, 1),
    (256, 1024, 64, 128),
]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_bsr(sizes, causal, backend, device):
    check_bsr(*plan_bsr(sizes, device, causal=causal, backend=backend))


@pytest.mark.parametrize("heads", [(1, 1, 64), (4, 4, 80), (14, 2, 128), (6, 2, 256)])
def test_bsr_heads(heads, device):
    check_bsr(*plan_bsr((64, 96, 8, 16), device, heads=heads))


@pytest.mark.parametrize("options", [{"mask": True}, {"logits_soft_cap": 2.0}, {"sm_scale": 0.3}])
@pytest.mark.parametrize("sizes", [(64, 256, 16, 16), (33, 35, 3, 5)])
def test_bsr_options(sizes, options, backend, device):
    check_bsr(*plan_bsr(sizes, device, backend=backend, **options))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP16, FP16), (BF16, E4M3), (FP16, E4M3)])
def test_bsr_dtypes(dtype, kv_dtype, device):
    check_bsr(*plan_bsr((64, 256, 16, 16), device, dtype=dtype, kv_dtype=kv_dtype))


def test_a_row_without_blocks_is_zero(device):
    wrapper, tensors = plan_bsr((32, 64, 16, 16), device, density=0.0)
    out, lse = wrapper.run(**tensors, return_lse=True)
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


def test_packed_mask_is_the_mask(device):
    sizes = (33, 35, 3, 5)
    wrapper, tensors = plan_bsr(sizes, device, mask=True)
    expected = wrapper.run(**tensors)
    indptr, indices = random_bsr(11, 7, 0.4)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(len(indices), 3, 5, generator=generator).to(device) < 0.6
    flat = convert_bsr_mask_layout(mask, indptr)
    packed, _ = flashinfer.segment_packbits(flat, (indptr * 15).to(device), "little")
    again, _ = plan_bsr(sizes, device, packed_mask=packed)
    assert torch.equal(again.run(**tensors), expected)


def test_strided_inputs_and_destinations(device):
    wrapper, tensors = plan_bsr((64, 256, 16, 16), device)
    wide = {name: torch.cat([x, x], -1)[..., : x.shape[-1]] for name, x in tensors.items()}
    assert not wide["q"].is_contiguous()
    out = torch.empty(64, 8, 2, 128, dtype=BF16, device=device)[:, :, 0]
    check(type(wrapper).run, self=wrapper, return_lse=True, **wide, out=out)


def test_forward_takes_options(device):
    wrapper, tensors = plan_bsr((64, 256, 16, 16), device)
    capped, _ = plan_bsr((64, 256, 16, 16), device, logits_soft_cap=2.0, sm_scale=0.3)
    given = wrapper.forward(**tensors, logits_soft_cap=2.0, sm_scale=0.3)
    torch.testing.assert_close(given, capped.run(**tensors), rtol=2**-7, atol=2**-8)
    plain, _ = plan_bsr((64, 256, 16, 16), device)
    expected = plain.run(**tensors)
    torch.testing.assert_close(wrapper.forward(**tensors), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}])
@pytest.mark.parametrize("sizes", [(64, 256, 16, 16), (33, 35, 3, 5), (64, 32, 16, 8)])
def test_pages_say_what_the_matrix_says(sizes, options, device):
    """The problem that the kernel is given, computed as paged attention."""
    wrapper, tensors = plan_bsr(sizes, device, **options)
    problem = wrapper._problem
    inputs = problem_arguments(problem, {}, device)
    for name in ("o_dtype", "sinks"):
        inputs.pop(name, None)
    pages = (sizes[1] // sizes[3], sizes[3], *tensors["k"].shape[1:])
    k, v = tensors["k"].view(pages), tensors["v"].view(pages)
    actual = _paged_attention_reference(tensors["q"], k, v, **inputs)
    template = block_sparse_attention_run_trace(return_lse=True)
    expected = template.compute({"self": wrapper, **tensors})
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# ---- blocks of any sizes -----------------------------------------------------------------------


def plan_variable(
    device: torch.device,
    *,
    heads: tuple[int, int, int] = (4, 2, 128),
    rows: tuple[int, ...] = (10, 0, 64, 6),
    columns: tuple[int, ...] = (64, 16, 0, 128, 48),
    dtype: torch.dtype = BF16,
    backend: str = "auto",
    **options: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Each head has the same sizes in another order."""
    qo_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(4)
    blocks = torch.rand(kv_heads, len(rows), len(columns), generator=generator) < 0.5
    sizes = [
        torch.stack([torch.tensor(s)[torch.randperm(len(s), generator=generator)] for _ in blocks])
        for s in (rows, columns)
    ]
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device), backend)
    wrapper.plan(blocks, *sizes, *heads, q_data_type=dtype, **options)
    q = randn((qo_heads, sum(rows), dim), dtype, device, 1)
    k, v = (randn((kv_heads, sum(columns), dim), dtype, device, seed) for seed in (2, 3))
    return wrapper, {"q": q, "k": k, "v": v}


@pytest.mark.parametrize("heads", [(2, 2, 128), (6, 2, 64), (5, 1, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [(64, 16, 0, 128, 48), (7, 30, 1, 50)])
def test_variable_blocks(heads, causal, columns, backend, device):
    options = {"heads": heads, "causal": causal, "columns": columns, "backend": backend}
    wrapper, tensors = plan_variable(device, **options)
    check(type(wrapper).run, self=wrapper, return_lse=True, **tensors)


def test_variable_blocks_with_soft_cap_in_float16(device):
    wrapper, tensors = plan_variable(device, dtype=FP16, logits_soft_cap=3.0, sm_scale=0.2)
    check(type(wrapper).run, self=wrapper, return_lse=True, **tensors)


@pytest.mark.parametrize("heads", [(2, 2, 128), (6, 2, 64)])
def test_variable_blocks_write_where_they_are_told(heads, device):
    wrapper, tensors = plan_variable(device, heads=heads)
    expected = wrapper.run(**tensors, return_lse=True)
    shape = (heads[0], 80, heads[2])
    contiguous = torch.empty(shape, dtype=BF16, device=device)
    strided = torch.empty(80, heads[0], heads[2], dtype=BF16, device=device).transpose(0, 1)
    for out in (contiguous, strided):
        lse = torch.empty(heads[0], 80, device=device)
        returned = wrapper.run(**tensors, out=out, lse=lse, return_lse=True)
        assert returned[0] is out and returned[1] is lse
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
