"""Random batches of latent attention: right, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.mla.batches import BACKENDS, BF16, FP16, Batch, check, make_wrapper, need_hopper, randn

PARTS = 4
CASES, FULL_CASES, CPU_CASES = 12, 625, 2  # of each part


def draw_batch(draw: random.Random) -> Batch:
    size = draw.choice([1, 1, 2, 3, 5, 17])
    longest = draw.choice([1, 3, 70, 200, 700, 3000]) if size < 5 else draw.choice([1, 70, 300])
    most = draw.choice([1, 1, 1, 2, 4, 9, 40])
    # Modules that test_mla.py has, too.
    kinds = [(512, 64, BF16)] * 4 + [
        (512, 64, FP16),
        (512, 0, BF16),
        (256, 64, BF16),
        (256, 0, BF16),
    ]
    head_dim_ckv, head_dim_kpe, dtype = draw.choice(kinds)
    return Batch(
        tuple(draw.randint(0 if draw.random() < 0.2 else 1, most) for _ in range(size)),
        tuple(draw.randint(0, longest) for _ in range(size)),
        num_heads=draw.choice([1, 2, 8, 12, 16, 20, 40, 64, 65, 96, 128]),
        head_dim_ckv=head_dim_ckv,
        head_dim_kpe=head_dim_kpe,
        page_size=draw.choice([1, 1, 2, 3, 8, 16, 32, 48, 64, 64, 64, 100, 128]),
        causal=draw.random() < 0.5,
        dtype=dtype,
        seed=draw.randrange(1000),
    )


def draw_options(draw: random.Random, batch: Batch, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"return_lse": True}
    if draw.random() < 0.3:
        options["sinks"] = randn((batch.num_heads,), torch.float32, device, batch.seed) * 3
    if draw.random() < 0.2:
        options["ckv_scale"] = options["kpe_scale"] = draw.choice([0.5, 3.0])
    if draw.random() < 0.2:
        options["return_lse_base_on_e"] = True
    return options


def spread_out(draw: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same values at other strides."""
    q = arguments["q_nope"]
    if draw.random() < 0.3:
        arguments["q_nope"] = q.transpose(0, 1).contiguous().transpose(0, 1)
    if draw.random() < 0.3:
        arguments["ckv_cache"] = arguments["ckv_cache"].contiguous()
    return arguments


def with_8_bits(draw: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """Caches in e4m3; rotary rows keep their type now and then, as test_mla_float8.py has them."""
    keeps = draw.random() < 0.5 and arguments["q_nope"].shape[-1] == 512
    for name in ("ckv_cache", "kpe_cache"):
        if name in arguments and not (keeps and name == "kpe_cache"):
            arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    return arguments


FAULTS: list[tuple[str, Any]] = [
    ("q_nope", lambda t: t[..., 8:]),
    ("q_nope", lambda t: t.double()),
    ("q_nope", lambda t: torch.cat([t, t], 1)),
    ("ckv_cache", lambda t: t[..., :128]),
    ("ckv_cache", lambda t: t.float()),
    ("ckv_cache", lambda t: t[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2)),
    ("sinks", lambda t: torch.zeros(3)),
    ("ckv_scale", lambda t: 0.0),
    ("out", lambda t: torch.zeros(1, 1, 1)),
    ("lse", lambda t: torch.zeros(1, 1, 1)),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_random_batches(part: int, device: torch.device, full: bool):
    need_hopper(device)
    count = FULL_CASES if full else CASES if device.type == "cuda" else CPU_CASES
    draw = random.Random(part)
    for case in range(count):
        batch = draw_batch(draw)
        if device.type != "cuda" and sum(batch.qo_lens) * batch.num_heads > 300:
            continue
        backend = draw.choice(BACKENDS)
        wrapper = make_wrapper(device, backend=backend)
        sm_scale = draw.choice([192**-0.5, 0.01, 0.5])
        arguments = spread_out(draw, batch.arguments(device))
        changes: dict[str, Any] = {}
        if backend != "fa2" and draw.random() < 0.3:
            changes["kv_data_type"] = torch.float8_e4m3fn
            arguments = with_8_bits(draw, arguments)
        batch.plan(wrapper, sm_scale=sm_scale, **changes)
        options = draw_options(draw, batch, device)
        name, spoil = draw.choice(FAULTS)
        try:
            check(wrapper, **arguments, **options)
        except Exception as error:
            raise AssertionError(
                f"case {case}: {batch}, {backend=}, {sm_scale=}, {changes}, {options}"
            ) from error
        if sum(batch.qo_lens) == 0:
            continue
        wrong = {**arguments, name: spoil(arguments.get(name))}
        with pytest.raises((ValueError, TypeError)):
            wrapper.run(**wrong)
