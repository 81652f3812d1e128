"""With `fixed_split_size`, a request's bits do not depend on its batch.

Random batches of prompts, parts of prompts and requests that decode hold one request that is also
run alone and in another batch, at another place: its output and its log-sum-exp must be the same
bits. 288 batches in all on a GPU, and 2,000 of each kernel under ``--full``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

import flashinfer
from tests.attention.batches import BF16, E4M3, need_backend, randn

PAGE, NUM_PAGES = 16, 512
BATCHES, FULL_BATCHES, BATCHES_OF_THE_REFERENCE = 36, 1000, 1
WORKSPACE_BYTES = 1 << 30  # short cuts of long requests: many partial results


class Kind(NamedTuple):
    """Heads and element types of a wrapper."""

    qo_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16


KINDS = (
    *(Kind(8, 2, 128), Kind(4, 4, 64), Kind(16, 1, 128), Kind(4, 2, 256)),
    *(Kind(8, 2, 128, BF16, E4M3), Kind(8, 2, 128, E4M3, E4M3)),
)


@dataclasses.dataclass(frozen=True)
class Request:
    qo_len: int
    kv_len: int
    first_page: int
    seed: int

    @property
    def num_pages(self) -> int:
        return -(-self.kv_len // PAGE)

    def query(self, kind: Kind, device: torch.device) -> torch.Tensor:
        return randn((self.qo_len, kind.qo_heads, kind.head_dim), kind.dtype, device, self.seed)


def _request(rng: random.Random, decodes: bool) -> Request:
    kv_len = int(2 ** rng.uniform(0, 11.5))
    kind = "decode" if decodes else rng.choice(["prompt", "part", "decode"])
    qo_len = {"prompt": min(kv_len, 600), "part": rng.randint(1, min(kv_len, 300)), "decode": 1}
    first = rng.randrange(NUM_PAGES - -(-kv_len // PAGE))
    return Request(qo_len[kind], kv_len, first, rng.randrange(1 << 30))


def _options(rng: random.Random, decodes: bool) -> dict[str, Any]:
    options = {
        "fixed_split_size": rng.choice([16, 64, 256, 1024]),
        "disable_split_kv": rng.random() < 0.3,
        "window_left": rng.choice([-1, -1, 100]),
        "logits_soft_cap": rng.choice([0.0, 0.0, 20.0]),
    }
    return options if decodes else {**options, "causal": rng.random() < 0.8}


class Runner:
    """One wrapper and one cache; each call plans and runs a batch."""

    def __init__(self, backend: str, decodes: bool, kind: Kind, workspace: torch.Tensor) -> None:
        self.kind, self.decodes, self.device = kind, decodes, workspace.device
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        if decodes:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self.wrapper = wrapper(workspace, backend=backend)
        shape = (NUM_PAGES, 2, PAGE, kind.kv_heads, kind.head_dim)
        self.pages = randn(shape, kind.kv_dtype, self.device)

    def run(self, requests: Sequence[Request], options: dict[str, Any]) -> list[torch.Tensor]:
        """Outputs and log-sum-exps of the requests, in turn."""
        starts = torch.tensor([0, *(r.qo_len for r in requests)]).cumsum(0).int()
        first = torch.tensor([0, *(r.num_pages for r in requests)]).cumsum(0).int()
        numbers = [n for r in requests for n in range(r.first_page, r.first_page + r.num_pages)]
        indices = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        last = torch.tensor([(r.kv_len - 1) % PAGE + 1 for r in requests], dtype=torch.int32)
        tables = (first, indices, last) if self.decodes else (starts, first, indices, last)
        kind = self.kind
        dtypes = {"q_data_type": kind.dtype, "kv_data_type": kind.kv_dtype, "o_data_type": BF16}
        self.wrapper.plan(*tables, *kind[:3], PAGE, **dtypes, **options)
        q = torch.cat([r.query(kind, self.device) for r in requests])
        out, lse = self.wrapper.run(q, self.pages, return_lse=True)
        counts = [r.qo_len for r in requests]
        pairs = zip(out.split(counts), lse.split(counts), strict=True)
        return [torch.cat([rows.flatten().float(), sums.flatten()]) for rows, sums in pairs]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("backend", "decodes"), [("fa2", 0), ("fa3", 0), ("auto", 0), ("fa2", 1)])
def test_bits_do_not_depend_on_the_batch(
    backend: str, decodes: int, seed: int, device: torch.device, full: bool
):
    need_backend(backend, device)
    rng = random.Random(f"{backend} {decodes} {seed}")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # A module is compiled for each kind; by default four tests share them.
    kinds = KINDS if full else rng.sample(KINDS, 2)
    runners = [Runner(backend, bool(decodes), kind, workspace) for kind in kinds]
    batches = FULL_BATCHES if full else BATCHES
    for number in range(batches if device.type == "cuda" else BATCHES_OF_THE_REFERENCE):
        runner, options = rng.choice(runners), _options(rng, bool(decodes))
        subject = _request(rng, bool(decodes))
        (alone,) = runner.run([subject], options)
        others = [_request(rng, bool(decodes)) for _ in range(rng.randint(1, 12))]
        place = rng.randint(0, len(others))
        together = runner.run([*others[:place], subject, *others[place:]], options)[place]
        assert not alone.isnan().any()
        assert torch.equal(alone, together), f"batch {number}: {subject}, {options}, {others}"
