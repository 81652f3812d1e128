"""Attention of several ranks against attention of whole sequences in float64: over gloo with the
reference backend, over NCCL where there are two GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashinfer
from flashinfer.compat.backends import BackendSupportedError
from flashinfer.parallel_attention import (
    ParallelAttention,
    UnevenCPConfig,
    VarlenCPConfig,
    get_parallel_groups,
    ring_varlen_config,
    split_varlen_input,
    ulysses_varlen_config,
    uneven_cp_config,
)
from tests.comm.ranks import needs_two_gpus, ranks_of_tests

HEADS, KV_HEADS, DIM = 8, 4, 64
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-3}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """``[tokens, heads, dim]`` each, in float64; rows without keys are zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5
    if causal:
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        logits = logits.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1).nan_to_num(0.0), v)


@dataclasses.dataclass(frozen=True)
class Case:
    """How sequences are divided; `ranks` is (Ulysses, ring)."""

    ranks: tuple[int, int]
    kind: str = "even"  # even, uneven, varlen
    layout: str = "NHD"
    causal: bool = False
    dtype: torch.dtype = torch.float16
    fuse_qkv: bool = False


def cases(world_size: int) -> list[Case]:
    """Every division of the ranks that the heads allow, with every kind that it allows, both
    layouts and masks."""
    found = []
    for ulysses in range(1, world_size + 1):
        if world_size % ulysses or KV_HEADS % ulysses:
            continue
        ranks = (ulysses, world_size // ulysses)
        for kind in ("even", "uneven", "varlen") if 1 in ranks else ("even", "uneven"):
            for causal in (False, True):
                found.append(Case(ranks, kind, ("NHD", "HND")[causal], causal))
        found.append(Case(ranks, dtype=torch.bfloat16, fuse_qkv=True))
    return [*found, Case((1, world_size), dtype=torch.float32)]


def whole_and_lengths(case: Case, draw: random.Random) -> tuple[list[torch.Tensor], list[int]]:
    """Queries, keys and values of all ranks, and the tokens of each sequence."""
    world_size = case.ranks[0] * case.ranks[1]
    lengths = [world_size * 9]
    if case.kind == "uneven":
        lengths = [world_size * 9 - draw.randint(1, world_size - 1) if world_size > 1 else 8]
    if case.kind == "varlen":
        lengths = [draw.choice((0, 1, 2, 5, 17, 30)) for _ in range(4)] + [11]
    torch.manual_seed(draw.randint(0, 1 << 30))
    shapes = ((sum(lengths), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape).to(case.dtype) for shape in shapes], lengths


def divide(case: Case, tensor: torch.Tensor, lengths: list[int], rank: int) -> torch.Tensor:
    """A rank's tokens; what it gets for padding must not matter, so that is NaN."""
    world_size = case.ranks[0] * case.ranks[1]
    if case.kind == "varlen" and case.ranks[1] > 1:
        return split_varlen_input(tensor, lengths, world_size, rank, "NHD")
    share = -(-tensor.shape[0] // world_size)
    part = tensor[rank * share : (rank + 1) * share]
    missing = share - part.shape[0]
    return torch.cat([part, part.new_full((missing, *part.shape[1:]), float("nan"))])


def configured(case: Case, lengths: list[int], rank: int, groups: Any) -> dict[str, Any]:
    """The configuration of a case."""
    ring, ulysses = groups
    world_size = case.ranks[0] * case.ranks[1]
    if case.kind == "uneven":
        padded = -(-lengths[0] // world_size) * world_size
        share = padded // world_size
        own = min(max(lengths[0] - rank * share, 0), share)
        parts = uneven_cp_config(lengths[0], padded, own, ulysses, ring)
        return {"uneven_cp_config": UnevenCPConfig(lengths[0], padded, parts)}
    if case.kind == "even":
        return {"uneven_cp_config": UnevenCPConfig(), "varlen_cp_config": VarlenCPConfig()}
    config = VarlenCPConfig()
    if case.ranks[1] > 1:
        config.set_varlen_cp_config(*ring_varlen_config(lengths, lengths, ring), ulysses, ring)
    else:
        config.set_varlen_cp_config(*ulysses_varlen_config(lengths, lengths), ulysses, ring)
    return {"varlen_cp_config": config}


def check(case: Case, rank: int, device: torch.device) -> None:
    draw = random.Random(repr(case))
    tensors, lengths = whole_and_lengths(case, draw)
    groups = get_parallel_groups(*case.ranks, device_type=device.type)
    attention = ParallelAttention(
        "auto", groups[1], groups[0], fuse_qkv=case.fuse_qkv,
        **configured(case, lengths, rank, groups),
    )  # fmt: skip
    local = [divide(case, tensor, lengths, rank).to(device) for tensor in tensors]
    if case.layout == "HND":
        local = [tensor.transpose(0, 1).contiguous() for tensor in local]
    bounds = pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist())
    expected = torch.cat([attend(*(t[a:b] for t in tensors), case.causal) for a, b in bounds])
    wanted = divide(case, expected, lengths, rank).nan_to_num(0.0)  # padding gives zeros
    for _ in range(2):  # the second call finds its plans
        out = attention.run(*local, tensor_layout=case.layout, is_causal=case.causal)
        assert out.dtype == case.dtype and out.is_contiguous()
        got = (out.transpose(0, 1) if case.layout == "HND" else out).double().cpu()
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE[case.dtype], msg=repr(case))


def check_refusals(rank: int, device: torch.device) -> None:
    """What ranks give differently is told to all of them, and what no rank may give to each."""
    ring, ulysses = get_parallel_groups(2, dist.get_world_size() // 2, device.type)
    x = torch.zeros(6, HEADS, DIM, dtype=torch.float16, device=device)
    attention = ParallelAttention("auto", ulysses, ring)
    with pytest.raises(ValueError, match="ranks must call `run` alike"):
        attention.run(x[: 6 - rank % 2], x, x, "NHD")
    with pytest.raises(ValueError, match="`query` must have a multiple of 2 heads.*got 3"):
        attention.run(x[:, :3], x, x, "NHD")
    if ring is not None:
        offsets = torch.zeros(2, 3, dtype=torch.int32)
        attention.varlen_cp_config = VarlenCPConfig(None, None, None, None, offsets, offsets)
        with pytest.raises(ValueError, match="in a Ulysses group or in a ring, not in both"):
            attention.run(x, x, x, "NHD")
        with pytest.raises(ValueError, match="`seq_len_cur_rank` must have the sum"):
            uneven_cp_config(20, 24, 6, ulysses, ring)
    with pytest.raises(ValueError, match=r"`ulysses_size` \* `ring_size` must divide the"):
        get_parallel_groups(dist.get_world_size() + 1, 1, device.type)


@contextlib.contextmanager
def _process_group(backend: str, rank: int, world_size: int, port: int) -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def _rank(rank: int, world_size: int, port: int, device_type: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type)
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
        else:
            stack.enter_context(flashinfer.reference_backend())
        backend = "nccl" if device_type == "cuda" else "gloo"
        stack.enter_context(_process_group(backend, rank, world_size, port))
        for case in cases(world_size):
            check(case, rank, device)
        if world_size % 2 == 0:
            check_refusals(rank, device)


def _run(world_size: int, device_type: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (world_size, port, device_type), nprocs=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_over_gloo(world_size: int):
    _run(world_size, "cpu")


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("world_size", ranks_of_tests(2))
def test_ranks_over_nccl(world_size: int):
    _run(world_size, "cuda")


@pytest.mark.parametrize("case", cases(1), ids=repr)
def test_one_rank_needs_no_group(case: Case, device: torch.device):
    draw = random.Random(repr(case))
    tensors, lengths = whole_and_lengths(case, draw)
    attention = ParallelAttention("auto", None, None)
    if case.kind == "uneven":
        attention.uneven_cp_config = UnevenCPConfig(lengths[0], lengths[0])
    if case.kind == "varlen":
        config = attention.varlen_cp_config = VarlenCPConfig()
        config.set_varlen_cp_config(*ulysses_varlen_config(lengths, lengths), None, None)
    local = [t.transpose(0, 1) if case.layout == "HND" else t for t in tensors]
    out = attention.run(*(t.to(device) for t in local), case.layout, is_causal=case.causal)
    got = (out.transpose(0, 1) if case.layout == "HND" else out).double().cpu()
    bounds = pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist())
    expected = torch.cat([attend(*(t[a:b] for t in tensors), case.causal) for a, b in bounds])
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_parts_of_sequences(layout: str):
    """Against the definition, element by element."""
    lengths, world_size = [2, 0, 5, 9], 4
    tensor = torch.arange(1, 17, dtype=torch.float32)
    shape = (1, 16, 1) if layout == "HND" else (16, 1, 1)
    offsets, _, most, _ = ring_varlen_config(lengths, lengths, None)
    assert offsets.tolist() == [[0, 2, 2, 7, 16]] and most == 9
    seen = []
    for rank in range(world_size):
        part = split_varlen_input(tensor.view(shape), lengths, world_size, rank, layout).flatten()
        assert part.shape[0] == 1 + 0 + 2 + 3
        chosen = [
            begin + 1 + i
            for begin, n in ((0, 2), (2, 0), (2, 5), (7, 9))
            for i in range(n)
            if i // max(-(-n // world_size), 1) == rank
        ]
        assert part.tolist() == chosen + [0] * (6 - len(chosen))
        seen += chosen
    assert sorted(seen) == list(range(1, 17))


def test_what_cannot_be_served_is_refused():
    x = torch.zeros(6, HEADS, DIM, dtype=torch.float16)
    attention = ParallelAttention("auto", None, None)
    for arguments, error, text in (
        ({"attn_mask": x}, ValueError, "`attn_mask` must be None"),
        ({"return_lse": True}, ValueError, "`return_lse` must be False, got True"),
        ({"cur_rank_max_seqlen_q": 3}, ValueError, "`cur_rank_max_seqlen_q` must be 0, got 3"),
        ({"scale": 2.0}, TypeError, "`run` has no argument `scale`"),
        ({"tensor_layout": "HDN"}, ValueError, "`tensor_layout` must be"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be"),
        ({"query": x.double()}, ValueError, "`query` must"),
        ({"key": x.bfloat16()}, ValueError, "`key` must"),
        ({"key": x[:, :3], "value": x[:, :3]}, ValueError, "`key` must have a divisor of 8 heads"),
        ({"value": x[:5]}, ValueError, "`value` must have the tokens and heads of `key`"),
        ({"key": x[..., :32]}, ValueError, "`key` must have head size 64, got 32"),
    ):
        call = {"query": x, "key": x, "value": x, "tensor_layout": "NHD", **arguments}
        with pytest.raises(error, match=text):
            attention.run(**call)
    for config, text in (
        ({"uneven_cp_config": UnevenCPConfig(7, 6)}, "`query` must have at least the 7 tokens"),
        ({"uneven_cp_config": UnevenCPConfig(5, 8)}, "`seq_len_padded` must be 6"),
        ({"varlen_cp_config": VarlenCPConfig(torch.tensor([0, 6]))}, "must be given, it is None"),
        (
            {"varlen_cp_config": VarlenCPConfig(*[torch.tensor([1, 6])] * 2)},
            "must begin with 0 and not decrease",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            ParallelAttention("auto", None, None, **config).run(x, x, x, "NHD")
    with pytest.raises(BackendSupportedError, match="'cutlass' is for Blackwell: take 'auto'"):
        ParallelAttention("cutlass", None, None)
    with pytest.raises(ValueError, match="`attn_type` must be"):
        ParallelAttention("flash", None, None)
    with pytest.raises(TypeError, match="`uneven_cp_config` must be UnevenCPConfig or None"):
        ParallelAttention("auto", None, None, VarlenCPConfig())
    with pytest.raises(ValueError, match="`seq_len_list` must have the sum 6"):
        split_varlen_input(x, [1, 2], 2, 0, "NHD")
    with pytest.raises(ValueError, match="as many lengths"):
        ulysses_varlen_config([1, 2], [3])
    with pytest.raises(TypeError, match="must be a list of one or more lengths"):
        ulysses_varlen_config([], [])


def test_configurations_forget():
    config = VarlenCPConfig(torch.tensor([0, 6]), torch.tensor([0, 6]), 6, 6)
    config.reset()
    assert set(vars(config).values()) == {None}
    uneven = UnevenCPConfig(5, 6)
    uneven.reset()
    assert uneven == UnevenCPConfig()
