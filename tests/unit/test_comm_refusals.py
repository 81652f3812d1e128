"""Refusals of communication on the CPU, where no rank is waited for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as Pattern
from flashinfer.comm import all_reduce_call
from flashinfer.comm.peer_workspace import CommWorkspace, PeerWorkspace

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("bindings_on_the_cpu")]
TOKENS, HIDDEN = 4, 64
ON_THE_CPU = "`input` must be a CUDA tensor"


class Peers(PeerWorkspace):
    """The memory of two ranks, as far as a binding looks at it."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.half_bytes = 0, 2, 1 << 20
        self.max_ctas, self.is_shared_device = 132, False
        self.device = torch.device("cuda", 0)
        self.struct = CommWorkspace(half_bytes=self.half_bytes, world_size=2, max_ctas=132)
        self.bytes = torch.frombuffer(self.struct, dtype=torch.uint8)

    def check(self) -> None:
        """Nothing fails here."""


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> comm.TRTLLMAllReduceFusionWorkspace:
    monkeypatch.setattr(all_reduce_call, "_kernels", {})
    made = object.__new__(comm.TRTLLMAllReduceFusionWorkspace)
    made._peers = Peers()
    return made


def rows(count: int = TOKENS) -> torch.Tensor:
    return torch.randn(count, HIDDEN).bfloat16()


def refusal(workspace: Any, pattern: Pattern, **change: Any) -> str:
    call = {
        "input": rows(),
        "residual_in": rows(),
        "rms_gamma": torch.ones(HIDDEN).bfloat16(),
        "scale_factor": 1.0,
        **change,
    }
    with pytest.raises(ValueError) as caught:
        comm.allreduce_fusion(workspace=workspace, pattern=pattern, **call)
    return str(caught.value)


@pytest.mark.parametrize("count", [TOKENS - 1, TOKENS + 1])
def test_an_input_of_other_rows_than_the_residual(workspace, count):
    message = refusal(workspace, Pattern.kARResidualRMSNorm, input=rows(count))
    assert message == f"`input` must have the shape of `residual_in`, [4, 64], got [{count}, 64]"


def test_rows_may_be_written_where_they_are_read(workspace):
    x, residual, pattern = rows(), rows(), Pattern.kARResidualRMSNorm
    for change in (
        {},
        {"norm_out": x, "residual_out": residual},
        {"norm_out": residual, "residual_out": x},
        {"output": x, "input": x.view(-1, HIDDEN)},
    ):
        call = {"input": x, "residual_in": residual, **change}
        assert ON_THE_CPU in refusal(workspace, pattern, **call)
    assert ON_THE_CPU in refusal(workspace, Pattern.kAllReduce, input=x, output=x)


def shared() -> list[tuple[str, Pattern, dict[str, Any]]]:
    """What overlaps, by the message that must come."""
    norm, codes = Pattern.kARResidualRMSNorm, Pattern.kARResidualRMSNormFP8Quant
    x, two, memory = rows(), rows(), rows(TOKENS + 1)
    bytes_of_x = x.view(torch.float8_e4m3fn).view(-1)[: TOKENS * HIDDEN]
    first, later = memory[:TOKENS], memory[1:]
    return [
        ("`norm_out` and `residual_out`", norm, {"norm_out": two, "residual_out": two}),
        ("`norm_out` and `input`", norm, {"norm_out": later, "input": first}),
        ("`residual_out` and `residual_in`", norm, {"residual_out": later, "residual_in": first}),
        ("`residual_out` and `rms_gamma`", norm, {"residual_out": x, "rms_gamma": x[1]}),
        ("`output` and `norm_out`", norm, {"output": two, "norm_out": two}),
        ("`output` and `input`", Pattern.kAllReduce, {"output": later, "input": first}),
        ("`quant_out` and `input`", codes, {"quant_out": bytes_of_x, "input": x}),
    ]


CASES = shared()


@pytest.mark.parametrize(("names", "pattern", "change"), CASES, ids=[case[0] for case in CASES])
def test_results_that_share_memory(workspace, names, pattern, change):
    written, other = re.findall("`[a-z_]+`", names)
    message = refusal(workspace, pattern, **change)
    assert message == f"{written} must not share memory with {other}"


def test_a_workspace_of_another_device():
    class OnSecond(torch.Tensor):
        def get_device(self) -> int:
            return 1

    x = rows().as_subclass(OnSecond)
    with pytest.raises(ValueError, match="`workspace` is on cuda:0 and .* on cuda:1"):
        Peers().launch(lambda *arguments: None, x)


def test_older_interfaces_name_their_own_arguments(workspace, monkeypatch):
    monkeypatch.setattr("flashinfer.comm.trtllm_ar.opened", lambda *arguments: workspace.peers)
    with pytest.raises(ValueError, match="`inp` must be a CUDA tensor"):
        comm.trtllm_custom_all_reduce(rows(), rows(), 2, 0, torch.zeros(1))
    with pytest.raises(ValueError, match="`out` must have 256 elements"):
        comm.trtllm_custom_all_reduce(rows(), rows(3), 2, 0, torch.zeros(1))
