"""Pipelines: the same tokens fused and unfused, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.logits_processor import (
    CompileError,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    legalize_processors,
)

PIPELINES = [
    ([Sample()], {}, 1),
    ([Softmax(), Sample()], {}, 1),
    ([Temperature(), Softmax(), Sample()], {"temperature": 0.7}, 2),
    ([Temperature(), Softmax(), TopK(), Sample()], {"temperature": 0.7, "top_k": 9}, 2),
    ([Softmax(), TopP(top_p=0.8), Sample()], {}, 2),
    ([Softmax(), MinP(min_p=0.1), Sample()], {}, 2),
    ([Softmax(), TopK(top_k=9), TopP(top_p=0.8), Sample()], {}, 1),
    ([TopK(top_k=9), Sample()], {}, 2),
    (
        [Temperature(), Softmax(), TopK(), TopP(), Sample()],
        {"temperature": 0.7, "top_k": 20, "top_p": 0.7},
        2,
    ),
]


def _name(value):
    """A test's name that does not depend on where objects lie."""
    return "-".join(type(v).__name__ for v in value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("processors", "parameters", "length"), PIPELINES, ids=_name)
def test_fused_and_unfused_draw_the_same(processors, parameters, length, device):
    logits = torch.randn(6, 517, device=device) * 3
    key = {"seed": torch.arange(6, device=device), **parameters}
    logits_in = TensorType.LOGITS
    fused = LogitsPipe(processors, input_type=logits_in)
    unfused = LogitsPipe(processors, compile=False, input_type=logits_in)
    assert len(fused.compiled_ops) == length
    assert len(unfused.ops) == len(processors)
    if type(fused.compiled_ops[-1]).__name__ != "TopPSampleOp":  # draws in another way
        assert torch.equal(fused(logits, **key), unfused(logits, **key))
    tagged = TaggedTensor.logits(logits)
    assert torch.equal(fused(tagged, **key), fused(logits, **key))


def test_per_row_parameters(device):
    logits = torch.randn(3, 517, device=device)
    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), Sample()])
    tokens = pipe(
        logits,
        temperature=torch.tensor([0.5, 1.0, 2.0], device=device),
        top_k=torch.tensor([1, 1, 1], device=device).int(),
        seed=1,
    )
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_temperature_by_itself_is_that_of_the_softmax(dtype, device):
    """At its limits, too: greedy rows of a batch, rows without a distribution."""
    logits = (torch.randn(9, 517, device=device) * 3).to(dtype)
    logits[5, 3], logits[6, 2], logits[7], logits[8] = torch.nan, torch.inf, -torch.inf, 2.0
    temperature = torch.tensor([0, 1.0, 0.5, 0, -1, 0, 0, 0, 0], device=device)
    fused = LogitsPipe([Temperature(), Softmax()])
    unfused = LogitsPipe([Temperature(), Softmax()], compile=False)
    expected = fused(logits, temperature=temperature)
    assert expected.isnan().all(-1).nonzero().flatten().tolist() == [4, 5, 7]
    actual = unfused(logits, temperature=temperature)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-5, equal_nan=True)
    greedy = LogitsPipe([Temperature(), TopK(top_k=40), Sample()])
    tokens = greedy(logits[[0, 3, 6]], temperature=temperature[[0, 3, 6]], seed=1)
    assert tokens.tolist() == logits[[0, 3, 6]].argmax(-1).tolist()
    torch.testing.assert_close(
        unfused(logits[:4], temperature=0), fused(logits[:4], temperature=0), rtol=0, atol=0
    )


def test_pipelines_without_a_draw(device):
    logits = torch.randn(3, 517, device=device)
    probs = LogitsPipe([Softmax(), TopK(top_k=5)])(logits)
    assert (probs > 0).sum(-1).tolist() == [5] * 3
    masked = LogitsPipe([TopK()], input_type=TensorType.LOGITS)(logits, top_k=4)
    assert masked.isfinite().sum(-1).tolist() == [4] * 3
    kept = LogitsPipe([TopP(top_p=0.5)])(torch.softmax(logits, -1))
    torch.testing.assert_close(kept.sum(-1), torch.ones(3, device=device))


def test_joint_filters(device):
    logits = torch.randn(4, 517, device=device)
    joint = LogitsPipe([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()])
    assert "Joint" in repr(joint)
    tokens = joint(logits, top_k=50, top_p=0.9, seed=2)
    assert tokens.shape == (4,)
    top_k = TopK(joint_topk_topp=True)
    for processors, compile in (
        ([Softmax(), top_k], True),
        ([Softmax(), top_k, MinP(), TopP(), Sample()], True),
        ([top_k, Softmax(), TopP(), Sample()], True),
        ([Softmax(), top_k, TopP(), Sample()], False),
    ):
        with pytest.raises(CompileError, match="joint_topk_topp"):
            LogitsPipe(processors, compile=compile, input_type=TensorType.LOGITS)


def test_min_p_without_a_draw(device):
    nan = float("nan")
    rows = [[0.5, 0.3, 0.2], [0, 0, 0], [nan, 1, 0], [0.5, -0.5, 0.1], [0.5, 0.5, 0]]
    pipe = LogitsPipe([MinP()])
    shares = torch.tensor([0.5, 0.5, 0.5, -1.0, nan], device=device)
    kept = pipe(torch.tensor(rows, device=device), min_p=shares)
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0], device=device))
    assert kept[1].tolist() == [0, 0, 0] and kept[[2, 4]].isnan().all()
    torch.testing.assert_close(kept[3], torch.tensor([5 / 6, 0, 1 / 6], device=device))


def test_refusals(device):
    logits = torch.randn(2, 9, device=device)
    with pytest.raises(LegalizationError, match="TopP takes probs, got logits"):
        LogitsPipe([TopP()], input_type=TensorType.LOGITS)
    for first in (TopK(), Sample()):
        with pytest.raises(LegalizationError, match="Cannot infer .* `input_type` must be"):
            LogitsPipe([first])
    assert LogitsPipe([TopP(), Sample()]).initial_type is TensorType.PROBS
    assert LogitsPipe([Temperature(), Sample()]).initial_type is TensorType.LOGITS
    top_k = LogitsPipe([TopK()], input_type=TensorType.LOGITS)
    with pytest.raises(LegalizationError, match="Temperature"):
        LogitsPipe([Softmax(), Temperature()])
    with pytest.raises(ValueError, match="processors"):
        LogitsPipe([])
    with pytest.raises(ValueError, match="`top_k`"):
        top_k(logits)
    with pytest.raises(TypeError, match="`top_q`"):
        top_k(logits, top_q=1)
    with pytest.raises(ValueError, match="probs"):
        top_k(TaggedTensor.probs(logits), top_k=1)
    with pytest.raises(ValueError, match="temperature"):
        LogitsPipe([Temperature()])(logits, temperature=-0.5)


def test_parameters_of_other_processors_are_refused():
    for processor, params in (
        (Softmax, {"temperature": 2.0}),
        (Sample, {"sead": 3}),
        (Temperature, {"enable_pdl": True}),
        (TopK, {"top_p": 0.5}),
        (TopP, {"top_k": 5}),
        (MinP, {"top_p": 0.5}),
    ):
        with pytest.raises(TypeError, match=f"`{next(iter(params))}` is no parameter of"):
            processor(**params)
    with pytest.raises(TypeError, match="`joint_topk_topp` must be a bool"):
        TopK(joint_topk_topp="no")


def test_what_is_no_number_of_the_rows_is_refused(device):
    logits = torch.randn(2, 9, device=device)
    for name, pipe in (
        ("temperature", LogitsPipe([Temperature()])),
        ("min_p", LogitsPipe([MinP()])),
    ):
        for value in ("x", True, [0.5]):
            with pytest.raises(TypeError, match=f"`{name}` must be a number"):
                pipe(logits, **{name: value})
        for count in (0, 3, 5):
            with pytest.raises(ValueError, match=f"`{name}` must have one element or 2"):
                pipe(logits, **{name: torch.ones(count, device=device)})
        assert pipe(logits, **{name: torch.ones(1, device=device)}).shape == logits.shape
    sample = LogitsPipe([Sample()], input_type=TensorType.LOGITS)
    with pytest.raises(TypeError, match="`check_nan` must be"):
        sample(logits, check_nan="no", seed=1)


class _ClampOp(Op):
    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.logits(tensor.data.clamp(max=kwargs.get("limit", 1.0)))


class _Clamp(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        return [_ClampOp()]


def test_custom_processors_rules_and_checks(device):
    logits = torch.randn(3, 51, device=device) * 9
    pipe = LogitsPipe([_Clamp(), Softmax()])
    torch.testing.assert_close(pipe(logits, limit=2.0), torch.softmax(logits.clamp(max=2.0), -1))

    rule = FusionRule((_ClampOp, _ClampOp), lambda ops: True, lambda ops: ops[0], prio=99)
    joined = LogitsPipe([_Clamp(), _Clamp()], custom_fusion_rules=[rule])
    assert [type(op) for op in joined.compiled_ops] == [_ClampOp]

    def no_clamp(ops: list[Op]) -> None:
        if any(isinstance(op, _ClampOp) for op in ops):
            raise CompileError("no clamp")

    with pytest.raises(CompileError, match="no clamp"):
        LogitsPipe([_Clamp()], custom_validity_checks=[no_clamp])
    assert [type(op).__name__ for op in legalize_processors([Softmax()])] == ["SoftmaxOp"]
