"""Random calls of random sizes, with random delays between the ranks."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as Pattern
from flashinfer.jit.comm import (
    AllReduceConfig,
    ExchangeConfig,
    gen_all_reduce_module,
    gen_exchange_module,
)
from tests.comm.ranks import TIMEOUT, needs_gpu, ranks_of_tests, run_ranks
from tests.comm.test_all_reduce import close, everyone_is_here, open_workspace

pytestmark = needs_gpu
IN_A_CHILD = True
SECONDS = 1.0
FULL_CALLS = {2: 1_000_000, 4: 100_000, 8: 100_000}  # where each rank has a GPU
ROWS, HIDDEN, BATCH = 64, 2048, 50
RANKS = ranks_of_tests(2, 4, 8)
BF16 = torch.bfloat16


def modules():
    """The plain sum, the norm and the exchange of every group."""
    reductions = [AllReduceConfig(BF16, r, output=o) for r in RANKS for o in ("sum", "norm")]
    exchanges = [ExchangeConfig(BF16, ranks, adds) for ranks in RANKS for adds in (False, True)]
    return [
        *(gen_all_reduce_module(config) for config in reductions),
        *(gen_exchange_module(config) for config in exchanges),
    ]


class Call(NamedTuple):
    """A call that all ranks draw alike. Elements of a rank are `value` + its number."""

    kind: str  # sum, norm, gather or scatter
    rows: int
    hidden: int
    value: int
    one_shot: bool


def draw(shared: random.Random) -> Call:
    kind = shared.choice(["sum", "sum", "norm", "gather", "scatter"])
    rows, hidden = shared.randint(1, ROWS), 8 * shared.randint(1, HIDDEN // 8)
    return Call(kind, rows, hidden, shared.randrange(8), shared.choice([True, False]))


class Rank:
    """One rank's workspaces, its inputs, and places for results of a batch of calls."""

    def __init__(self, backend) -> None:
        self.rank, self.world_size = backend.Get_rank(), backend.Get_size()
        ones = torch.ones(self.world_size * ROWS * HIDDEN, dtype=BF16, device="cuda")
        self.inputs = [ones * (value + self.rank) for value in range(8)]
        self.weight, self.normed = ones[:HIDDEN], torch.empty_like(ones)
        self.zeros = torch.zeros_like(ones)
        self.outputs = ones.new_empty(BATCH, len(ones))
        self.places = torch.arange(len(ones), dtype=torch.int32, device="cuda")
        torch.cuda._sleep(1)
        # Calls ask for one-shot at any size, whatever the thresholds of so many ranks are.
        self.reduction = open_workspace(
            backend, ROWS, HIDDEN, force_oneshot_support=self.world_size > 2
        )
        self.exchange = comm.ExchangeWorkspace(2 * ROWS * HIDDEN, backend)
        self.exchange.set_timeout(TIMEOUT)

    def start(self, call: Call, place: int) -> None:
        count = call.rows * call.hidden
        x, out = self.inputs[call.value], self.outputs[place]
        shape = call.rows, call.hidden
        if call.kind == "gather":
            comm.all_gather(x[:count], self.exchange, out[: self.world_size * count])
        elif call.kind == "scatter":
            comm.reduce_scatter(x[: self.world_size * count], self.exchange, out[:count])
        elif call.kind == "norm":
            comm.allreduce_fusion(
                x[:count].view(shape), self.reduction, Pattern.kARResidualRMSNorm,
                residual_in=self.zeros[:count].view(shape), rms_gamma=self.weight[: call.hidden],
                residual_out=out[:count].view(shape), norm_out=self.normed[:count].view(shape),
                use_oneshot=call.one_shot,
            )  # fmt: skip
        else:
            comm.allreduce_fusion(
                x[:count].view(shape), self.reduction, Pattern.kAllReduce,
                output=out[:count].view(shape), use_oneshot=call.one_shot,
            )  # fmt: skip

    def wrong(self, calls: list[Call]) -> int:
        """Elements of the results of a batch that are not what all ranks' inputs make."""

        def column(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device="cuda")[:, None]

        counts = column([call.rows * call.hidden for call in calls])
        values = column([call.value for call in calls])
        gathers = column([call.kind == "gather" for call in calls]).bool()
        sums = self.world_size * values + sum(range(self.world_size))
        expected = torch.where(gathers, values + self.places // counts, sums)
        ends = torch.where(gathers, self.world_size * counts, counts)
        return int(((self.outputs != expected) & (self.places < ends)).sum())


def fuzz(backend, seconds: float, least: int = 0) -> tuple[int, int]:
    """Calls made, at least `least`, and wrong elements. Ranks draw alike, but for the delays."""
    rank = Rank(backend)
    shared, own = random.Random(5), random.Random(rank.rank)
    everyone_is_here(backend)
    made, wrong, end = 0, 0, time.monotonic() + seconds
    goes_on = True
    while goes_on:
        calls = [draw(shared) for _ in range(BATCH)]
        for place, call in enumerate(calls):
            if own.random() < 0.2:
                torch.cuda._sleep(own.randrange(200_000))
            rank.start(call, place)
        torch.cuda.current_stream().synchronize()
        made += BATCH
        wrong += rank.wrong(calls)
        goes_on = backend.allgather(made < least or time.monotonic() < end)[0]
    backend.barrier()
    rank.exchange.destroy()
    close(rank.reduction, backend)
    return made, wrong


@pytest.mark.parametrize("ranks", RANKS)
def test_random_calls_with_delays(ranks, full):
    alone = ranks <= max(torch.cuda.device_count(), 2)
    least = FULL_CALLS.get(ranks, 20_000) if full and alone else 0
    results = run_ranks(
        ranks,
        lambda backend: fuzz(backend, SECONDS, least),
        first=lambda backend: fuzz(backend, 0),
        freely=True,
    )
    print(f"{results[0][0]} calls of {ranks} ranks with delays", flush=True)
    assert all(bad == 0 for _, bad in results)
