"""How a plan travels: through few files, and to native exports that take few arguments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.planner import AttentionPlanner, PlanConfig
from flashinfer._attention.plan.requests import ArgumentNames, Requests
from flashinfer._attention.plan.spec import AttentionSpec
from flashinfer.jit.attention.modules import CtaSlots
from flashinfer.jit.attention.plan import get_attention_plan_module

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PACKAGE = str(Path(flashinfer.__file__).parent)
REQUESTS = Requests(
    ArgumentNames.DECODE,
    None,
    torch.tensor([0, 2], dtype=torch.int32),
    last_page_len=torch.tensor([1], dtype=torch.int32),
    page_size=4,
)


def files_of(call: Any) -> set[str]:
    """Files of the package whose functions run."""
    found = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.compiler
def test_a_decoding_plan_passes_through_six_files(monkeypatch: pytest.MonkeyPatch):
    """After the first plan with the same options, on a GPU."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr, last = torch.tensor([0, 3, 5]).int(), torch.tensor([16, 3]).int()
    arguments = (indptr, torch.arange(5).int(), last, 8, 2, 64, 16)
    with flashinfer.reference_backend():
        wrapper.plan(*arguments, q_data_type="bfloat16")
    executor = wrapper._executor
    executor.device = torch.device("cuda")
    executor._modules[executor._key] = SimpleNamespace(
        cta_slots=lambda _: CtaSlots(264, 1), bind=lambda *_: None, run=None, launch_bytes=0
    )
    default_stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: default_stream)
    files = files_of(lambda: wrapper.plan(*arguments, q_data_type="bfloat16"))
    assert len(files) <= 6, sorted(files)


@pytest.mark.parametrize("name", ["attention_jit_binding.cc", "attention_plan_jit_binding.cc"])
def test_exports_take_few_arguments(name: str):
    text = (CSRC / name).read_text()
    head = text.partition("#include")[0]
    stated = dict(re.findall(r"^//   (\w+)\(([^()]*)\)", head, flags=re.M))
    assert set(stated) == set(re.findall(r"^FLASHINFER_FFI_EXPORT(?:_INT)?\((\w+),", text, re.M))
    counts = {name: len(re.findall(r"\w+", arguments)) for name, arguments in stated.items()}
    assert max(counts.values()) <= 12, counts


@pytest.mark.compiler
def test_what_is_left_over_is_refused():
    planner, module = AttentionPlanner(), get_attention_plan_module()
    planner.configure(PlanConfig(2, 4, 128, tile_q=16, tile_q_second=0, tile_kv=64))
    arguments = (planner._native, None, -1, *REQUESTS)
    module.attention_plan(*arguments)
    with pytest.raises(TypeError, match="takes 12 arguments, got 14"):
        module.attention_plan(*arguments, "surplus", 42)
    with pytest.raises(TypeError, match="missing argument `window_left`"):
        module.attention_plan(*arguments[:-1])


@pytest.mark.compiler
def test_bytes_that_are_no_planner_are_refused():
    module = get_attention_plan_module()
    size = module.attention_planner_size()
    with pytest.raises(RuntimeError, match=r"attention_plan_create\(\) comes first"):
        module.attention_plan_int_bytes(torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"`planner` must have at least {size} aligned bytes"):
        module.attention_plan_int_bytes(torch.zeros(size - 16, dtype=torch.uint8))


def test_specs_are_values():
    heads = (8, 2, 64, 64, torch.float16, torch.float16, torch.float16)
    one, same, other = (AttentionSpec(*heads, sm_scale=scale) for scale in (0.5, 0.5, 1.0))
    assert one == same and hash(one) == hash(same) and one != other
    assert one.kernel_options == other.kernel_options  # scales select no code
    with pytest.raises(ValueError, match="`num_qo_heads` must be 1 to 64 times"):
        AttentionSpec(7, 2, *heads[2:], sm_scale=1.0)
