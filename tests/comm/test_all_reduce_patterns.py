"""All-reduce with what follows it, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer import SfLayout, comm, nvfp4_quantize
from flashinfer.comm import AllReduceFusionPattern as Pattern
from flashinfer.comm import all_reduce_call, patterns, trtllm_ar
from flashinfer.jit.comm import AllReduceConfig, gen_all_reduce_module
from tests.comm import test_all_reduce
from tests.comm.ranks import bits, needs_gpu, numbers, rank_sum, ranks_of_tests, run_ranks
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
        # Room for both protocols: two ranks have it, and lose that of two-shot by asking.
        roomy = {"force_oneshot_support": world_size > 2}
        workspace = open_workspace(backend, tokens, hidden, residual.dtype, **roomy)
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


RANKS = ranks_of_tests(2)  # two ranks may share a GPU, more have one each
CODES = [
    (4, "row_e4m3"),  # four may share one here
    *((n, codes) for n in RANKS for codes in ("static_e4m3", "nvfp4_linear", "nvfp4_128x4")),
    *((n, "row_e4m3") for n in RANKS if n not in (2, 4)),
]


def modules():
    """Plain sums and norms, codes, and sums of experts."""
    codes = [AllReduceConfig(BF16, ranks, output=output) for ranks, output in CODES]
    kinds = "moe_reduction", "moe_finalize"
    experts = [AllReduceConfig(BF16, n, kind, "norm") for n in RANKS for kind in kinds]
    return [
        *test_all_reduce.modules(),
        *(gen_all_reduce_module(config) for config in [*codes, *experts]),
    ]


@pytest.mark.parametrize("world_size, dtype", test_all_reduce.GROUPS)
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


TOKENS, HIDDEN, TERMS = 5, 1024, 3


def norm_problem(world_size):
    """Partial sums, residual and weight."""
    inputs = [numbers(TOKENS, HIDDEN, dtype=BF16, seed=rank) for rank in range(world_size)]
    return (
        inputs,
        numbers(TOKENS, HIDDEN, dtype=BF16, seed=50),
        numbers(HIDDEN, dtype=BF16, seed=51),
    )


def run_codes(world_size, pattern, source, result, codes, scales, scale_factor=None, **options):
    """The outputs of each rank by a pattern with codes, on the CPU."""
    inputs, residual, weight = norm_problem(world_size)
    all_reduce_call.load(BF16, world_size, source, result)

    def body(backend):
        workspace = open_workspace(backend, TOKENS, HIDDEN)
        made = {
            "norm_out": torch.empty_like(residual, device="cuda"),
            "quant_out": torch.zeros(codes[0], dtype=codes[1]).cuda(),
        }
        if scales is not None:
            made["scale_out"] = torch.zeros(scales[0], dtype=scales[1]).cuda()
        x, r, w = inputs[backend.Get_rank()].cuda(), residual.cuda(), weight.cuda()
        scale = scale_factor.cuda() if isinstance(scale_factor, torch.Tensor) else scale_factor
        torch.cuda.synchronize()
        backend.barrier()
        comm.allreduce_fusion(
            x, workspace, pattern, residual_in=r, rms_gamma=w, rms_eps=EPS,
            scale_factor=scale, **made, **options,
        )  # fmt: skip
        results = {name: tensor.cpu() for name, tensor in made.items()}
        close(workspace, backend)
        return results

    everyone = run_ranks(world_size, body)
    h = rank_sum(inputs).double() + residual.double()
    for results in everyone:
        torch.testing.assert_close(
            results["norm_out"].double(), normed(h, weight), rtol=2**-7.9, atol=1e-6
        )
    return everyone


def test_results_may_stand_where_inputs_were():
    inputs, residual, weight = norm_problem(2)

    def body(backend):
        workspace, results = open_workspace(backend, TOKENS, HIDDEN), []
        w = weight.cuda()
        for one_shot in (True, False):
            for names in (("norm_out", "residual_out"), ("residual_out", "norm_out")):
                x, r = inputs[backend.Get_rank()].cuda(), residual.cuda()
                backend.barrier()
                comm.allreduce_fusion(
                    x, workspace, Pattern.kARResidualRMSNorm, residual_in=r, rms_gamma=w,
                    rms_eps=EPS, use_oneshot=one_shot, **dict(zip(names, (x, r), strict=True)),
                )  # fmt: skip
                results.append({name: t.cpu() for name, t in zip(names, (x, r), strict=True)})
        close(workspace, backend)
        return results

    h = rank_sum(inputs).double() + residual.double()
    for results in run_ranks(2, body):
        for result in results:
            assert torch.equal(result["residual_out"], h.to(BF16))
            expected = normed(h, weight)
            torch.testing.assert_close(
                result["norm_out"].double(), expected, rtol=2**-7.9, atol=1e-6
            )


def check_e4m3(codes, scaled):
    """Nearest codes: within half a step of 2^-3, or of the smallest one."""
    error = (codes.double() - scaled.clamp(-448, 448)).abs()
    assert (error <= 1.01 * torch.maximum(scaled.abs() * 2**-4, torch.tensor(2.0**-10))).all()


@pytest.mark.parametrize("scale", [0.05, torch.tensor([0.02])])
@pytest.mark.parametrize("ranks", RANKS)
def test_e4m3_codes_with_a_given_scale(ranks, scale):
    shape = (TOKENS, HIDDEN), torch.float8_e4m3fn
    for results in run_codes(
        ranks, Pattern.kARResidualRMSNormOutFP8Quant, "tensor", "static_e4m3", shape, None,
        scale_factor=scale,
    ):  # fmt: skip
        check_e4m3(results["quant_out"], results["norm_out"].double() / float(scale))


@pytest.mark.parametrize("ranks", [n for n, codes in CODES if codes == "row_e4m3"])
def test_e4m3_codes_with_scales_of_rows(ranks):
    shapes = ((TOKENS, HIDDEN), torch.float8_e4m3fn), ((TOKENS,), FP32)
    for results in run_codes(
        ranks, Pattern.kARResidualRMSNormOutDynamicFP8Quant, "tensor", "row_e4m3", *shapes
    ):
        y = results["norm_out"].double()
        scales = y.abs().amax(-1) / 448
        torch.testing.assert_close(results["scale_out"].double(), scales, rtol=1e-6, atol=0)
        check_e4m3(results["quant_out"], y / scales[:, None])


@pytest.mark.parametrize(
    "layout", [comm.QuantizationSFLayout.SWIZZLED_128x4, comm.QuantizationSFLayout.LINEAR]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_nvfp4_codes_are_those_of_the_quantiser(ranks, layout):
    count = patterns.scale_bytes(TOKENS, HIDDEN, layout)
    shapes = ((TOKENS, HIDDEN // 2), torch.uint8), ((count,), torch.uint8)
    everyone = run_codes(
        ranks, Pattern.kARResidualRMSNormOutFP4Quant, "tensor", patterns.fp4_result(layout),
        *shapes, scale_factor=37.5, layout_code=int(layout),
    )  # fmt: skip
    layouts = {0: SfLayout.layout_128x4, 2: SfLayout.layout_linear}
    for results in everyone:
        codes, scales = nvfp4_quantize(
            results["norm_out"].cuda(), torch.tensor([37.5]).cuda(), layouts[int(layout)]
        )
        assert torch.equal(results["quant_out"], codes.cpu().view(torch.uint8))
        expected = scales.cpu().view(torch.uint8).flatten()
        written = results["scale_out"] != 0  # padding is not
        assert torch.equal(results["scale_out"][written], expected[written])
        assert written.sum() >= TOKENS * HIDDEN // 16


def expert_problem(world_size):
    """Outputs of experts, where they go, and what each rank adds in double precision."""
    shared = [numbers(TOKENS, HIDDEN, dtype=BF16, seed=10 + r) for r in range(world_size)]
    outputs = [numbers(TERMS, TOKENS, HIDDEN, dtype=BF16, seed=20 + r) for r in range(world_size)]
    scales = [numbers(TERMS, TOKENS, dtype=FP32, seed=30 + r) for r in range(world_size)]
    rows = torch.randint(-1, TERMS * TOKENS, (world_size, TOKENS, TERMS), dtype=torch.int32)
    rows[:, 0] = torch.tensor([-(2**31), TERMS * TOKENS, 2**31 - 1])  # of no row
    weights = numbers(world_size, TOKENS, TERMS, dtype=BF16, seed=40)
    return shared, outputs, scales, rows, weights


def by_older_names(backend, finalize, x, residual, gamma, moe):
    """The norm by TensorRT-LLM's names."""
    rank, ranks, out = backend.Get_rank(), backend.Get_size(), torch.empty_like(residual)
    _, pointers = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, ranks, TOKENS, HIDDEN, comm_backend=backend
    )
    backend.barrier()
    if finalize:
        comm.trtllm_moe_finalize_allreduce_fusion(
            x, residual, gamma, moe["expanded_idx_to_permuted_idx"], out, None, None, None,
            pointers, False, rank, ranks, EPS, moe["shared_expert_output"],
            moe["expert_scale_factor"], None,
        )  # fmt: skip
    else:
        comm.trtllm_moe_allreduce_fusion(
            ranks, rank, TOKENS, HIDDEN, pointers, False, residual, gamma, EPS, 1.0, TERMS,
            moe["moe_reduction_scale_input"], moe["moe_reduction_active_experts_token_input"],
            moe["moe_reduction_token_input"], None, None, None, out, None, None,
        )  # fmt: skip
    torch.cuda.current_stream().synchronize()
    backend.barrier()
    trtllm_ar.opened(pointers, ranks, rank).close()  # the function by name is for processes
    return out


@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_of_experts(ranks, finalize):
    torch.manual_seed(0)
    shared, outputs, scales, rows, weights = expert_problem(ranks)
    _, residual, gamma = norm_problem(ranks)
    kind = "moe_finalize" if finalize else "moe_reduction"
    all_reduce_call.load(BF16, ranks, kind, "norm")

    def body(backend):
        workspace = open_workspace(backend, TOKENS, HIDDEN)
        rank = backend.Get_rank()
        if finalize:
            pattern, x = Pattern.kMoEFinalizeARResidualRMSNorm, outputs[rank].view(-1, HIDDEN)
            moe = {
                "expanded_idx_to_permuted_idx": rows[rank].cuda(),
                "expert_scale_factor": weights[rank].cuda(),
                "shared_expert_output": shared[rank].cuda(),
            }
        else:
            pattern, x = Pattern.kMoEReductionARResidualRMSNorm, shared[rank]
            moe = {
                "moe_reduction_device_num_experts": TERMS,
                "moe_reduction_scale_input": scales[rank].cuda(),
                "moe_reduction_active_experts_token_input": outputs[rank].cuda(),
                "moe_reduction_token_input": shared[rank].cuda(),
            }
        x, r, w, out = x.cuda(), residual.cuda(), gamma.cuda(), residual.cuda()
        torch.cuda.synchronize()
        backend.barrier()
        y = comm.allreduce_fusion(
            x, workspace, pattern, residual_in=r, rms_gamma=w, rms_eps=EPS, output=out, **moe
        )
        results = out.cpu(), y.cpu(), by_older_names(backend, finalize, x, r, w, moe).cpu()
        close(workspace, backend)
        return results

    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.double)
    for r in range(ranks):
        if finalize:
            there = (rows[r] >= 0) & (rows[r] < TERMS * TOKENS)
            picked = outputs[r].view(-1, HIDDEN)[rows[r].long() * there].double()
            picked[~there] = 0
            total += (picked * weights[r].double()[..., None]).sum(1) + shared[r].double()
        else:
            total += (outputs[r].double() * scales[r].double()[..., None]).sum(0)
            total += shared[r].double()
    everyone = run_ranks(ranks, body)
    for out, y, z in everyone:
        assert torch.equal(bits(y), bits(z))
        # Each rank's part is rounded, and then the sum.
        torch.testing.assert_close(out.double(), total, rtol=2**-7, atol=0.05)
        expected = normed(out.double() + residual.double(), gamma)
        torch.testing.assert_close(y.double(), expected, rtol=2**-7.9, atol=1e-6)
    assert all(torch.equal(everyone[0][0], out) for out, *_ in everyone)


def test_wrong_patterns_are_refused_by_name():
    from flashinfer.compat.backends import BackendSupportedError

    def body(backend):
        workspace = open_workspace(backend)
        x = torch.empty(8, 512, dtype=torch.bfloat16, device="cuda")
        for pattern in (
            Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
            Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
        ):
            with pytest.raises(BackendSupportedError, match=f"{pattern.name} writes packed"):
                comm.allreduce_fusion(x, workspace, pattern)
        with pytest.raises(ValueError, match="`scale_factor` is needed by kARResidualRMSNormFP8"):
            comm.allreduce_fusion(
                x, workspace, Pattern.kARResidualRMSNormFP8Quant, residual_in=x, rms_gamma=x[0]
            )
        with pytest.raises(ValueError, match="`pattern` must be an AllReduceFusionPattern, got 99"):
            comm.allreduce_fusion(x, workspace, 99)
        with pytest.raises(TypeError, match="`residual_in` must be a torch.Tensor, got NoneType"):
            comm.allreduce_fusion(x, workspace, Pattern.kARResidualRMSNorm, rms_gamma=x[0])
        close(workspace, backend)

    run_ranks(2, body)
