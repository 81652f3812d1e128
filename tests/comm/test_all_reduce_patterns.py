"""All-reduce with what follows it, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as Pattern
from tests.comm.ranks import needs_gpu, numbers, rank_sum, run_ranks
from tests.comm.test_all_reduce import close, open_workspace

pytestmark = needs_gpu
IN_A_CHILD = True
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5


def normed(h: torch.Tensor, weight: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
    h = h.double()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * (weight.double() + bias)


def run_pattern(world_size, pattern, inputs, residual, weight, **options):
    """Sum, residual and norm of each rank, on the CPU."""
    tokens, hidden = residual.shape

    def body(backend):
        workspace = open_workspace(backend, tokens, hidden, residual.dtype)
        rank = backend.Get_rank()
        made = {
            "output": torch.empty_like(residual, device="cuda"),
            "residual_out": torch.empty_like(residual, device="cuda"),
            "norm_out": torch.empty_like(residual, device="cuda"),
        }
        x, r, w = inputs[rank].cuda(), residual.cuda(), weight.cuda()
        backend.barrier()
        for one_shot in (True, False):
            comm.allreduce_fusion(
                x,
                workspace,
                pattern,
                residual_in=r,
                rms_gamma=w,
                rms_eps=EPS,
                use_oneshot=one_shot,
                **made,
                **options,
            )
        results = {name: tensor.cpu() for name, tensor in made.items()}
        close(workspace, backend)
        return results

    return run_ranks(world_size, body)


def check_norm(results, total, residual, weight, bias=0.0):
    h = total.double() + residual.double()
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}[total.dtype]
    assert torch.equal(results["output"], total)
    assert torch.equal(results["residual_out"], (total.float() + residual.float()).to(total.dtype))
    expected = normed(h, weight, bias)
    error = (results["norm_out"].double() - expected).abs()
    assert (error <= 1.01 * tolerance * expected.abs() + 1e-7).all(), error.max()


@pytest.mark.parametrize(
    "world_size, dtype",
    [(2, BF16), (4, BF16), (8, BF16), (2, FP16), (2, FP32)],
)
def test_residual_and_norm(world_size, dtype):
    for bias, hidden in ((0.0, 128), (1.0, 4096), (0.0, 8192), (0.0, 16384)):
        hidden = min(hidden, 32768 // dtype.itemsize)  # the longest row
        inputs = [numbers(9, hidden, dtype=dtype, seed=rank) for rank in range(world_size)]
        residual = numbers(9, hidden, dtype=dtype, seed=50)
        weight = numbers(hidden, dtype=dtype, seed=51)
        everyone = run_pattern(
            world_size, Pattern.kARResidualRMSNorm, inputs, residual, weight, weight_bias=bias
        )
        for results in everyone:
            check_norm(results, rank_sum(inputs), residual, weight, bias)


def test_patterns_that_are_not_served_are_refused_by_name():
    from flashinfer.compat.backends import BackendSupportedError

    def body(backend):
        workspace = open_workspace(backend)
        x = torch.empty(8, 512, dtype=torch.bfloat16, device="cuda")
        for pattern in sorted(set(Pattern) - {Pattern.kAllReduce, Pattern.kARResidualRMSNorm}):
            with pytest.raises(BackendSupportedError, match=f"{pattern.name} is not served"):
                comm.allreduce_fusion(x, workspace, pattern)
        with pytest.raises(ValueError, match="`pattern` must be an AllReduceFusionPattern, got 99"):
            comm.allreduce_fusion(x, workspace, 99)
        with pytest.raises(TypeError, match="`residual_in` must be a torch.Tensor, got NoneType"):
            comm.allreduce_fusion(x, workspace, Pattern.kARResidualRMSNorm, rms_gamma=x[0])
        close(workspace, backend)

    run_ranks(2, body)
