"""The experts' all-to-all by ranks that share a GPU, against loops."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import Mapping, expert_memory, trtllm_alltoall
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.comm.trtllm_alltoall import MnnvlMoe
from flashinfer.jit.comm import (
    ExpertCombineConfig,
    ExpertDispatchConfig,
    gen_expert_combine_module,
    gen_expert_dispatch_module,
)
from tests.comm.ranks import (
    MORE_GPUS,
    TIMEOUT,
    bits,
    needs_gpu,
    numbers,
    ranks_of_tests,
    run_ranks,
    together,
)

pytestmark = needs_gpu
IN_A_CHILD = True
BF16, E4M3, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
HIDDEN, TOP_K, EXPERTS_PER_RANK, MAX_TOKENS = 256, 3, 4, 40
INVALID = -5
CASES = [
    (2, "even", BF16, False),
    (2, "even", E4M3, False),
    (4, "skewed", BF16, True),
    (8, "even", BF16, True),
    *((n, "even", BF16, True) for n in MORE_GPUS if n not in (4, 8)),
]


def modules():
    """Dispatch and combine of every case."""
    return [
        *(
            gen_expert_dispatch_module(ExpertDispatchConfig(n))
            for n in sorted({ranks for ranks, *_ in CASES})
        ),
        *(
            gen_expert_combine_module(ExpertCombineConfig(BF16, stored, BF16, ranks))
            for ranks, _, stored, _ in CASES
        ),
    ]


def choose(ranks: int, tokens: list[int], kind: str) -> list[torch.Tensor]:
    """Experts of each rank's tokens; some are nowhere."""
    generator = torch.Generator().manual_seed(1)
    last = EXPERTS_PER_RANK * ranks
    high = EXPERTS_PER_RANK if kind == "skewed" else last
    chosen = [torch.randint(0, high, (n, TOP_K), generator=generator, dtype=I32) for n in tokens]
    for experts in chosen:
        experts[::5, 0] = -1
        experts[1::7, 1] = last + 3
    return chosen


def goes_to(experts: torch.Tensor, rank: int) -> torch.Tensor:
    """Numbers of the tokens that have an expert of `rank`, in their order."""
    first = rank * EXPERTS_PER_RANK
    return ((experts >= first) & (experts < first + EXPERTS_PER_RANK)).any(1).nonzero().flatten()


def open_layer(backend, **options) -> comm.MoeAlltoAll:
    ranks = backend.Get_size()
    mapping = Mapping(ranks, backend.Get_rank(), ranks, tp_size=ranks, moe_ep_size=ranks)
    layer = comm.MoeAlltoAll(
        mapping, MAX_TOKENS, TOP_K, EXPERTS_PER_RANK * ranks, hidden_size=HIDDEN,
        mnnvl_config=MnnvlConfig(comm_backend=backend), **options,
    )  # fmt: skip
    layer.set_timeout(TIMEOUT)
    torch.cuda.synchronize()
    backend.barrier()
    return layer


def close(layer: comm.MoeAlltoAll, backend) -> None:
    torch.cuda.current_stream().synchronize()
    backend.barrier()
    layer.checkpoint_prepare()


@pytest.mark.parametrize(("ranks", "kind", "stored", "in_place"), CASES)
def test_tokens_go_out_and_outputs_come_back(ranks, kind, stored, in_place):
    """Rank 1 has no token; activations are 8 bits with scales; experts double what they get."""
    tokens = [0 if rank == 1 else 13 + 3 * rank for rank in range(ranks)]
    experts = choose(ranks, tokens, kind)
    x = [numbers(n, HIDDEN, dtype=BF16, seed=r).to(E4M3) for r, n in enumerate(tokens)]
    scales = [
        numbers(n, HIDDEN // 128, dtype=torch.float32, seed=9 + r) for r, n in enumerate(tokens)
    ]
    stats = [torch.arange(5, dtype=I32) + 10 * rank for rank in range(ranks)]
    expert_memory.load(ExpertDispatchConfig(ranks))
    expert_memory.load(ExpertCombineConfig(BF16, stored, BF16, ranks))

    def body(backend):
        layer, rank = open_layer(backend, eplb_stats_num_experts=5), backend.Get_rank()
        sent = [t[rank].cuda() for t in (x, scales, experts)]
        own_stats, results = stats[rank].cuda(), []
        for _ in range(3):
            received = layer.dispatch(sent[2], sent, MAX_TOKENS, INVALID, 2, own_stats)
            received = [each.cpu() for each in received]
            outputs = (2 * received[0].float()).nan_to_num().to(BF16)
            place = outputs.cuda()
            if in_place:
                place = layer.get_combine_payload_tensor_in_workspace(MAX_TOKENS, HIDDEN, BF16)
                place.copy_(outputs)
            combined = layer.combine(place, MAX_TOKENS, in_place, use_low_precision=stored is E4M3)
            results.append((received, layer.eplb_gathered_stats.cpu(), combined.cpu()))
        close(layer, backend)
        return results

    for rank, results in enumerate(run_ranks(ranks, body)):
        for (fp8, scale, ids), gathered, combined in results:
            assert torch.equal(gathered, torch.stack(stats))
            for source in range(ranks):
                mine = goes_to(experts[source], rank)
                n = len(mine)
                assert torch.equal(
                    fp8[source, :n].view(torch.uint8), x[source][mine].view(torch.uint8)
                )
                assert torch.equal(scale[source, :n], scales[source][mine])
                assert torch.equal(ids[source, :n], experts[source][mine])
                assert (ids[source, n:] == INVALID).all()
            times = torch.zeros(tokens[rank], 1)
            for target in range(ranks):
                times[goes_to(experts[rank], target)] += 1
            once = (2 * x[rank].float()).to(BF16)
            once = once.to(E4M3).float() if stored is E4M3 else once.float()
            assert torch.equal(combined, (once * times).to(BF16))


@pytest.mark.parametrize("ranks", ranks_of_tests(2))
def test_capture_and_replay(ranks):
    tokens = [7 + 2 * rank for rank in range(ranks)]
    experts = choose(ranks, tokens, "even")
    x = [numbers(n, HIDDEN, dtype=BF16, seed=r) for r, n in enumerate(tokens)]
    expert_memory.load(ExpertDispatchConfig(ranks))
    expert_memory.load(ExpertCombineConfig(*[BF16] * 3, ranks))

    def body(backend):
        layer, rank = open_layer(backend), backend.Get_rank()
        ids, mine, out = experts[rank].cuda(), x[rank].cuda(), torch.empty_like(x[rank]).cuda()

        def exchange():
            (received,) = layer.dispatch(ids, [mine], MAX_TOKENS)
            layer.combine(received, MAX_TOKENS, output=out)

        exchange()
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        graph = torch.cuda.CUDAGraph()
        with (
            capture_lock,
            torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            exchange()
            exchange()
        backend.barrier()
        for _ in range(10):
            together(graph.replay)
            exchange()
        result = out.cpu()
        close(layer, backend)
        return result

    capture_lock = threading.Lock()
    for rank, out in enumerate(run_ranks(ranks, body)):
        times = torch.zeros(tokens[rank], 1)
        for target in range(ranks):
            times[goes_to(experts[rank], target)] += 1
        assert torch.equal(out, (x[rank].float() * times).to(BF16))


@pytest.mark.parametrize("ranks", ranks_of_tests(2, 4))
def test_two_sided_names(ranks):
    """The same exchange in calls of its own; the second one needs more memory than the first."""
    tokens = [0 if rank == 1 else 5 + 3 * rank for rank in range(ranks)]
    experts = choose(ranks, tokens, "even")
    weights = [numbers(n, TOP_K, dtype=torch.float32, seed=5 + r) for r, n in enumerate(tokens)]
    x = [numbers(n, 8 * HIDDEN, dtype=BF16, seed=r) for r, n in enumerate(tokens)]
    slots = EXPERTS_PER_RANK * ranks
    expert_memory.load(ExpertDispatchConfig(ranks))
    expert_memory.load(ExpertCombineConfig(*[BF16] * 3, ranks))

    def body(backend):
        rank = backend.Get_rank()
        place = trtllm_alltoall.open_workspace(backend)
        mine = [each[rank].cuda() for each in (experts, weights, x)]
        statics = torch.full((slots,), rank, dtype=I32).cuda()
        results = []
        for _ in range(2):
            info, ids, scales, gathered = MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
                mine[0], mine[1], statics, place, MAX_TOKENS, rank, ranks, slots, slots, TOP_K
            )
            got = MnnvlMoe.mnnvl_moe_alltoallv(mine[2], info, place, rank, ranks)
            back = MnnvlMoe.mnnvl_moe_alltoallv_combine(
                got, info, place, rank, ranks, TOP_K, tokens[rank]
            )
            results.append([each.cpu() for each in (ids, scales, gathered, got, back)])
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        trtllm_alltoall.close_workspace(place)
        return results

    for rank, results in enumerate(run_ranks(ranks, body)):
        for ids, scales, gathered, got, back in results:
            assert torch.equal(gathered, torch.arange(ranks, dtype=I32)[:, None].expand(-1, slots))
            for source in range(ranks):
                mine = goes_to(experts[source], rank)
                rows = slice(source * MAX_TOKENS, source * MAX_TOKENS + len(mine))
                rest = slice(rows.stop, (source + 1) * MAX_TOKENS)
                assert torch.equal(ids[rows], experts[source][mine])
                assert torch.equal(scales[rows], weights[source][mine])
                assert torch.equal(bits(got[rows]), bits(x[source][mine]))
                assert (ids[rest] == slots).all() and (scales[rest] == 0).all()
            times = torch.zeros(tokens[rank], 1)
            for target in range(ranks):
                times[goes_to(experts[rank], target)] += 1
            assert torch.equal(back, (x[rank].float() * times).to(BF16))


def test_what_is_wrong_is_refused_before_anything_is_sent():
    def body(backend):
        layer = open_layer(backend)
        ids = torch.zeros(4, TOP_K, dtype=I32).cuda()
        x = torch.empty(4, HIDDEN, dtype=BF16).cuda()
        for arguments, message in (
            ((ids[:, :1], [x], 8), "`token_selected_experts` must have 3 columns"),
            ((ids, [x], MAX_TOKENS + 1), "`runtime_max_tokens_per_rank`"),
            ((ids, [x], 3), "`token_selected_experts` must have at most 3 rows"),
            ((ids, [], 8), "`input_payloads` must be 1 to 8"),
            ((ids, [x[:3]], 8), "`input_payloads` must have 4 rows"),
            ((ids, [x] * 8, MAX_TOKENS), "`workspace` is too small"),
        ):
            with pytest.raises(ValueError, match=message):
                layer.dispatch(*arguments)
        with pytest.raises(ValueError, match="`combine` must follow a dispatch"):
            layer.combine(x[None], 4)
        close(layer, backend)
        with pytest.raises(ValueError, match="prepared for a checkpoint"):
            layer.dispatch(ids, [x], 8)

    run_ranks(2, body)
