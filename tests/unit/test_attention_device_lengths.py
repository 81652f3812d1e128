"""How calls with lengths on the GPU are planned: by launches themselves, or by a kernel before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import executor, on_device, planner
from flashinfer._attention.plan.executor import AttentionExecutor
from flashinfer._attention.plan.launch import ModuleKey
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.jit.attention.config import PACKED_FLOAT4, AttentionConfig
from flashinfer.jit.attention.modules import CtaSlots

pytestmark = pytest.mark.compiler  # the planner is compiled for the host

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
REQUESTS, PAGES, PAGE = 3, 4, 16


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, and lies on the host."""

    is_cuda = True


class Calls:
    """What is done for calls, in place of native modules: modules of these configurations run."""

    launch_bytes = 0

    def __init__(self) -> None:
        self.configs: list[AttentionConfig] = []
        self.steps: list[str] = []

    def module(self, _: AttentionExecutor, key: ModuleKey) -> Any:
        self.configs.append(key.config())  # which refuses what there is no kernel for
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.steps.append(name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(AttentionExecutor, "_module", lambda *args: calls.module(*args))
    monkeypatch.setattr(AttentionExecutor, "_planned_module", lambda _: calls)
    monkeypatch.setattr(on_device, "slots_of_stream", lambda *_: CtaSlots(264, 1))
    monkeypatch.setattr(planner, "get_attention_device_plan_module", lambda: calls)
    monkeypatch.setattr(executor, "bind", lambda *_: calls.steps.append("bind"))
    return calls


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _call(
    function: Callable[..., Any] = trtllm_batch_decode_with_kv_cache,
    *,
    group: int = 4,
    tokens: int = 1,
    cumulative: bool = False,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    stored: torch.dtype = BF16,
    **options: Any,
) -> None:
    """Call a function that takes block tables with `REQUESTS` requests, two heads of keys."""
    shape, codes = (PAGES, 2, PAGE), 2 if stored == PACKED_FLOAT4 else 1
    cache = torch.zeros(2, *shape, head_dim // codes, dtype=stored)
    if stored == PACKED_FLOAT4:
        scales = torch.zeros(2, *shape, head_dim // 16, dtype=E4M3)
        options["kv_cache_sf"] = tuple(scales.unbind())
    out_dtype = BF16 if dtype == E4M3 else dtype
    query = torch.zeros(REQUESTS * tokens, 2 * group, head_dim, dtype=dtype)
    name = "q_cu_seq_lens" if function is xqa_batch_decode_with_kv_cache else "cum_seq_lens_q"
    if cumulative:
        options[name] = _ints(*(i * tokens for i in range(REQUESTS + 1)))
    if cumulative and function is trtllm_batch_decode_with_kv_cache:
        options["max_q_len"] = tokens
    else:
        options["q_len_per_req"] = tokens
    function(
        query,
        tuple(cache.unbind()),
        torch.empty(64 << 20, dtype=torch.uint8),
        _ints(*range(REQUESTS)).view(REQUESTS, 1),
        _ints(9, 0, 16).as_subclass(OnGpu),
        PAGE,
        out=torch.empty(query.shape, dtype=out_dtype),
        kv_layout="HND",
        **options,
    )


FUNCTIONS = [trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("group", "tokens", "head_dim", "tile"),
    [
        (4, 1, 128, 8),
        (4, 4, 64, 16),
        (8, 1, 512, 8),
        (8, 2, 448, 16),
        (48, 16, 512, 16),  # tiles of large heads have no more rows
    ],
)
def test_launches_of_few_rows_divide_their_work(
    calls: Calls, function: Any, group: int, tokens: int, head_dim: int, tile: int
):
    _call(function, group=group, tokens=tokens, head_dim=head_dim)
    config = calls.configs[-1]
    assert (config.tile_q, config.device_lengths) == (tile, True)
    assert calls.steps == ["bind", "lengths", "run"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize(
    ("group", "tokens", "head_dim", "tile"),
    [(48, 1, 128, 64), (4, 16, 128, 64), (48, 16, 128, 128), (7, 10, 64, 128), (48, 16, 256, 64)],
)
def test_a_kernel_plans_for_tiles_of_more_rows(
    calls: Calls,
    function: Any,
    cumulative: bool,
    group: int,
    tokens: int,
    head_dim: int,
    tile: int,
):
    _call(function, group=group, tokens=tokens, head_dim=head_dim, cumulative=cumulative)
    config = calls.configs[-1]
    assert (config.tile_q, config.device_lengths) == (tile, False)
    assert calls.steps == ["attention_device_plan", "bind", "run"]


@pytest.mark.parametrize("group", [1, 8, 48])
@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": F16, "stored": F16, "window_left": 5},
        {"sinks": True},
        {"stored": E4M3, "head_dim": 512},
        {"dtype": E4M3, "stored": E4M3, "head_dim": 448},
        {"stored": PACKED_FLOAT4},
        {"stored": PACKED_FLOAT4, "head_dim": 512, "sinks": True},
        {"head_dim": 256, "lse": True},
    ],
    ids=str,
)
def test_each_option_has_a_kernel(calls: Calls, group: int, tokens: int, options: dict[str, Any]):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.zeros(2 * group)
    if options.pop("lse", False):
        options["return_lse"] = True
    _call(group=group, tokens=tokens, cumulative=tokens > 1, **options)
    config = calls.configs[-1]
    assert config.device_lengths == (config.tile_q <= 16)
    assert config.sinks == ("sinks" in options)
    assert config.sliding_window == ("window_left" in options)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize(("group", "tokens"), [(4, 2), (8, 16)])
def test_kernels_read_masks_of_drafts(
    calls: Calls, function: Any, cumulative: bool, group: int, tokens: int
):
    mask = torch.ones(REQUESTS, tokens, 2, dtype=torch.int32).to(torch.uint16)
    _call(function, group=group, tokens=tokens, cumulative=cumulative, mask=mask)
    config = calls.configs[-1]
    assert (config.mask_mode, config.device_lengths) == ("draft", tokens == 2)


def test_a_launch_gets_the_words_of_a_mask(monkeypatch: pytest.MonkeyPatch, calls: Calls):
    found: list[Any] = []
    monkeypatch.setattr(executor, "bind", planner.bind)
    monkeypatch.setattr(Calls, "mask", lambda _, *args: found.append(args[1:]), raising=False)
    mask = torch.tensor([[1, 0], [3, 0]] * REQUESTS, dtype=torch.int32).to(torch.uint16)
    shifted = torch.cat([mask.view(-1)[:1], mask.view(-1)])[1:].view(REQUESTS, 2, 2)
    for given in (mask, shifted):  # words lie at multiples of four bytes
        _call(xqa_batch_decode_with_kv_cache, tokens=2, mask=given)
        words, starts = found.pop()
        assert starts is None and words.dtype == torch.uint8 and words.data_ptr() % 4 == 0
        assert words.view(torch.int32).flatten().tolist() == [1, 3] * REQUESTS


def test_counters_and_names_of_other_backends_are_taken(calls: Calls):
    for backend in ("xqa", "trtllm-gen"):
        _call(backend=backend, multi_ctas_kv_counter_buffer=torch.zeros(4, dtype=torch.uint8))
        assert calls.configs[-1].backend == "fa2"
    with pytest.raises(TypeError, match="multi_ctas_kv_counter_buffer"):
        _call(multi_ctas_kv_counter_buffer=4)
    with pytest.raises(ValueError, match="backend"):
        _call(backend="cutlass")


def test_cudnn_decode_has_the_same_kernels(calls: Calls):
    for group, tile in ((4, 8), (16, 16), (48, 64)):
        cache = torch.zeros(2, PAGES, 2, PAGE, 128, dtype=BF16)
        flashinfer.cudnn.cudnn_batch_decode_with_kv_cache(
            torch.zeros(REQUESTS, 2 * group, 128, dtype=BF16),
            *cache.unbind(),
            0.1,
            torch.empty(64 << 20, dtype=torch.uint8),
            max_sequence_kv=PAGE,
            actual_seq_lens_kv=_ints(9, 0, 16).as_subclass(OnGpu),
            block_tables=_ints(*range(REQUESTS)).view(REQUESTS, 1),
        )
        assert (calls.configs[-1].tile_q, calls.configs[-1].device_lengths) == (tile, tile < 64)


def test_a_plan_of_several_runs_is_written_down(calls: Calls):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8)
    )
    starts = _ints(0, 1, 3)
    flashinfer.fast_decode_plan(
        wrapper,
        starts.as_subclass(OnGpu),
        _ints(0, 1, 2),
        _ints(3, 4),
        *(8, 2, 128, PAGE),
        q_data_type=BF16,
        global_override_indptr_cpu=starts,
    )
    assert not calls.configs[-1].device_lengths
    assert calls.steps == ["attention_device_plan", "bind"]
