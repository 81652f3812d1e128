"""The words of a template: names, axes, dtypes, dispatch, and what is refused."""

from __future__ import annotations

import pytest
import torch

from flashinfer.api_logging import flashinfer_api
from flashinfer.compat.backends import backend_requirement
from flashinfer.fi_trace import build_fi_trace_fn, fi_trace, register_fi_trace
from flashinfer.trace import Const, Scalar, Tensor, TraceTemplate, Var
from flashinfer.trace.check import default_check, default_tolerances
from flashinfer.trace.template import resolve_template, templates_of
from flashinfer.trace.templates.activation import silu_and_mul_trace
from flashinfer.trace.templates.norm import fused_add_rmsnorm_trace, rmsnorm_trace

BF16 = torch.bfloat16


def _rmsnorm_arguments(*shape: int, dtype: torch.dtype = BF16, **changes):
    arguments = {"input": torch.zeros(*shape, dtype=dtype), "eps": 1e-6}
    return {**arguments, "weight": torch.zeros(shape[-1], dtype=dtype), **changes}


# ---- a template as the tutorial writes it ------------------------------------------------------


def _scale_reference(input, factor, bias=None, out=None):
    return input.double() * factor + (0 if bias is None else bias.double())


def _scale_template(**changes) -> TraceTemplate:
    fields = {
        "op_type": "scale",
        "name_prefix": "scale",
        "axes": {"rows": Var(), "columns": Const(abbrev="c")},
        "inputs": {
            "x": Tensor(["rows", "columns"], param="input"),
            "factor": Scalar("float32"),
            "bias": Tensor(["columns"], optional=True),
        },
        "outputs": {"y": Tensor(["rows", "columns"], dtype_from="input", param="out")},
        "reference": _scale_reference,
    }
    return TraceTemplate(**{**fields, **changes})


def _scale_arguments(**changes):
    return {"input": torch.ones(2, 3), "factor": 2.0, **changes}


def test_optional_input_is_left_out_of_definition_and_run():
    template = _scale_template()
    without = template.definition(_scale_arguments(), "m.scale")
    assert list(without["inputs"]) == ["x", "factor"]
    bias = torch.full((3,), 10.0)
    with_bias = template.definition(_scale_arguments(bias=bias), "m.scale")
    assert list(with_bias["inputs"]) == ["x", "factor", "bias"]
    assert without["name"] != with_bias["name"], "distinct definitions need distinct files"
    namespace: dict = {}
    exec(with_bias["reference"], namespace)
    assert namespace["run"](torch.ones(2, 3), 2.0, bias).tolist() == [[12.0] * 3] * 2
    exec(without["reference"], namespace)
    assert namespace["run"](torch.ones(2, 3), 2.0).tolist() == [[2.0] * 3] * 2


def test_dtype_from_takes_a_json_key_or_an_argument():
    for source in ("x", "input"):
        outputs = {"y": Tensor(["rows", "columns"], dtype_from=source)}
        definition = _scale_template(outputs=outputs).definition(_scale_arguments(), "m.scale")
        assert definition["outputs"]["y"]["dtype"] == "float32"


def _cast_reference(input, out_dtype):
    return input + torch.finfo(out_dtype).bits


def test_dtype_from_scalar_follows_the_argument():
    template = TraceTemplate(
        "cast",
        {"n": Var()},
        {"input": Tensor(["n"])},
        {"y": Tensor(["n"], dtype_from_scalar="out_dtype")},
        reference=_cast_reference,
    )
    arguments = {"input": torch.ones(3), "out_dtype": torch.float16}
    definition = template.definition(arguments, "m.cast")
    assert definition["outputs"]["y"]["dtype"] == "float16"
    namespace: dict = {}
    exec(definition["reference"], namespace)
    result = namespace["run"](torch.ones(3))
    assert result.dtype == torch.float16 and result.tolist() == [17.0] * 3


def _pair_reference(pair, page_size):
    return pair[0].double() + pair[1].double() * page_size


def test_tuple_elements_and_axes_from_arguments():
    template = TraceTemplate(
        "pair",
        {"n": Var(), "page_size": Const(abbrev="ps"), "three": Const(abbrev="", value=3)},
        {
            "k": Tensor(["n"], param="pair", tuple_idx=0),
            "v": Tensor(["n"], param="pair", tuple_idx=1),
        },
        {"y": Tensor(["n"], dtype_from="k")},
        reference=_pair_reference,
    )
    pair = (torch.ones(4), torch.ones(4))
    definition = template.definition({"pair": pair, "page_size": 16}, "m.pair")
    assert definition["name"] == "pair_ps16_f32"
    assert definition["axes"]["page_size"] == {"type": "const", "value": 16}
    assert definition["axes"]["three"]["value"] == 3
    namespace: dict = {}
    exec(definition["reference"], namespace)
    assert namespace["run"](*pair).tolist() == [17.0] * 4


def test_output_named_as_an_input_is_renamed_in_the_json():
    """The tutorial declares an in-place residual so; the format refuses the overlap."""
    template = _scale_template(outputs={"x": Tensor(["rows", "columns"], dtype_from="x")})
    definition = template.definition(_scale_arguments(), "m.scale")
    assert list(definition["outputs"]) == ["x_out"]


def test_unknown_axis_is_refused_when_the_template_is_written():
    with pytest.raises(ValueError, match="'length'"):
        _scale_template(outputs={"y": Tensor(["length"])})


def test_template_without_reference_has_no_definition():
    with pytest.raises(ValueError, match="no reference"):
        _scale_template(reference=None).definition(_scale_arguments(), "m.scale")


def test_reference_that_cannot_be_printed_is_refused():
    template = _scale_template(reference=_uses_an_object)
    with pytest.raises(ValueError, match="_OBJECT"):
        template.definition(_scale_arguments(), "m.scale")


_OBJECT = object()


def _uses_an_object(input, factor, bias=None, out=None):
    return input if _OBJECT else factor


def test_helpers_and_constants_are_printed_before_they_are_used():
    definition = _scale_template(reference=_uses_helper).definition(_scale_arguments(), "m.scale")
    namespace: dict = {}
    exec(definition["reference"], namespace)
    assert namespace["run"](torch.ones(2, 3), 2.0).tolist() == [[14.0] * 3] * 2


_SEVEN = 7


def _times_seven(x):
    return x * _SEVEN


def _uses_helper(input, factor, bias=None, out=None):
    return sum(_times_seven(part) for part in [input.double() * factor])


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (_rmsnorm_arguments(2, 4096), "rmsnorm_h4096"),
        (_rmsnorm_arguments(9, 4096), "rmsnorm_h4096"),
        (_rmsnorm_arguments(2, 8, 128), "rmsnorm_h128"),
        (_rmsnorm_arguments(2, 128, dtype=torch.float16), "rmsnorm_h128_f16"),
        (_rmsnorm_arguments(2, 128, dtype=torch.float32), "rmsnorm_h128_f32"),
    ],
)
def test_name_tells_definitions_apart(arguments, name):
    assert rmsnorm_trace.call_name(arguments) == name


def test_axis_without_abbreviation_is_spelled_out():
    template = _scale_template(axes={"rows": Const(), "columns": Const(abbrev="")})
    assert template.definition_name({"rows": 2, "columns": 3}) == "scale_rows2"


def test_derived_axis_and_folded_rows():
    values = silu_and_mul_trace.axis_values({"input": torch.zeros(2, 3, 4, 10)})
    assert values == {"num_tokens": 24, "gate_up_size": 10, "hidden_size": 5}
    assert silu_and_mul_trace.axis_values({"input": torch.zeros(10)})["num_tokens"] == 1
    assert silu_and_mul_trace.axis_values({"input": torch.zeros(0, 10)})["num_tokens"] == 0


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"weight": torch.zeros(9, dtype=BF16)}, ValueError, ["`weight`", "9", "8"]),
        ({"weight": torch.zeros(1, 8, dtype=BF16)}, ValueError, ["`weight`", "1 dim"]),
        ({"weight": torch.zeros(8)}, ValueError, ["`weight`", "float32", "bfloat16"]),
        ({"weight": None}, TypeError, ["`weight`", "NoneType"]),
        ({"input": torch.zeros(8, dtype=BF16)}, ValueError, ["`input`", "2 to 3"]),
        ({"input": torch.zeros(2, 8, dtype=torch.int32)}, ValueError, ["`input`", "int32"]),
        ({"input": torch.zeros(8, 2, dtype=BF16).T}, ValueError, ["`input`", "contiguous"]),
        ({"eps": -1.0}, ValueError, ["`eps`", "-1"]),
        ({"eps": float("inf")}, ValueError, ["`eps`", "inf"]),
        ({"eps": None}, TypeError, ["`eps`"]),
        ({"eps": True}, TypeError, ["`eps`", "bool"]),
        ({"enable_pdl": 1}, TypeError, ["`enable_pdl`", "int"]),
        ({"out": [1]}, TypeError, ["`out`", "list"]),
        ({"out": torch.zeros(2, 8)}, ValueError, ["`out`", "float32"]),
    ],
)
def test_refusal_names_argument_value_and_rule(changes, error, words):
    with pytest.raises(error) as caught:
        rmsnorm_trace.validate({**_rmsnorm_arguments(2, 8), **changes})
    for word in words:
        assert word in str(caught.value)


def test_same_rows_in_another_shape_are_refused():
    """[6, 8] and [2, 3, 8] are as many rows, but not one shape."""
    arguments = {**_rmsnorm_arguments(6, 8), "residual": torch.zeros(2, 3, 8, dtype=BF16)}
    with pytest.raises(ValueError, match="`residual`.*`input`"):
        fused_add_rmsnorm_trace.validate(arguments)


def test_odd_width_names_the_input():
    with pytest.raises(ValueError, match="`input`: gate_up_size == 2 . hidden_size"):
        silu_and_mul_trace.validate({"input": torch.zeros(2, 7)})


def test_rows_that_do_not_fold_are_refused():
    matrix = torch.zeros(4, 3, 8)
    silu_and_mul_trace.validate({"input": matrix[..., :4]})
    with pytest.raises(ValueError, match="fold"):
        silu_and_mul_trace.validate({"input": matrix[:, :2]})


# ---- fi_trace ----------------------------------------------------------------------------------


def _dispatch(**kwargs):
    return {"one": rmsnorm_trace, "none": None}[kwargs["mode"]]


_dispatch.templates = [rmsnorm_trace]


def test_dispatch_function_chooses_the_template():
    @flashinfer_api(trace=_dispatch)
    def norm(input, weight, eps=1e-6, out=None, mode="one"): ...

    arguments = _rmsnorm_arguments(2, 64)
    assert norm.fi_trace(**arguments)["name"] == "rmsnorm_h64"
    assert templates_of(_dispatch) == [rmsnorm_trace]
    with pytest.raises(ValueError, match="norm"):
        fi_trace(norm, **arguments, mode="none")


def test_dispatch_function_must_list_its_templates():
    with pytest.raises(ValueError, match="templates"):
        templates_of(lambda **kwargs: rmsnorm_trace)
    assert templates_of(None) == []
    assert resolve_template(None, {}) is None


def test_method_is_traced_through_its_object():
    class Wrapper:
        @flashinfer_api(trace=rmsnorm_trace)
        def run(self, input, weight, eps=1e-6, out=None): ...

    wrapper = Wrapper()
    definition = fi_trace(wrapper.run, **_rmsnorm_arguments(2, 64))
    assert definition["tags"][0].endswith("Wrapper.run")
    assert wrapper.run.fi_trace(**_rmsnorm_arguments(2, 64)) == definition


def test_arguments_are_those_of_the_signature():
    @flashinfer_api(trace=rmsnorm_trace)
    def norm(input, weight, eps=1e-6, out=None): ...

    x = torch.zeros(2, 64)
    with pytest.raises(TypeError, match="weight"):
        fi_trace(norm, input=x)
    with pytest.raises(TypeError, match="epsilon"):
        fi_trace(norm, input=x, weight=x[0], epsilon=1.0)
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(test_arguments_are_those_of_the_signature)


def test_keyword_of_the_checks_is_no_argument_of_the_operation():
    @flashinfer_api(trace=rmsnorm_trace)
    @backend_requirement({}, common_check=lambda input: True)
    def norm(input, weight, eps=1e-6, out=None): ...

    assert norm.fi_trace(**_rmsnorm_arguments(2, 64), skip_check=True)["name"] == "rmsnorm_h64"


def test_meta_tensors_are_enough():
    arguments = {"input": torch.empty(2, 64, device="meta"), "eps": 1e-6}
    arguments["weight"] = torch.empty(64, device="meta")
    assert rmsnorm_trace.definition(arguments, "m.f")["name"] == "rmsnorm_h64_f32"


def _plain_norm(input, weight, eps=1e-6, out=None, enable_pdl=None): ...


def test_registered_function_and_built_function(tmp_path):
    register_fi_trace(f"{__name__}._plain_norm", rmsnorm_trace)
    arguments = _rmsnorm_arguments(2, 64)
    definition = fi_trace(_plain_norm, save_dir=tmp_path, **arguments)
    assert (tmp_path / "rmsnorm_h64.json").exists()
    for spec in (rmsnorm_trace, _dispatch):
        built = build_fi_trace_fn(spec)(**arguments, mode="one")
        assert {**built, "tags": None} == {**definition, "tags": None}


# ---- default_check -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, torch.float8_e4m3fn])
def test_default_check_accepts_rounding_and_refuses_more(dtype):
    expected = torch.randn(64, 64, dtype=torch.float64)
    rounded = expected.to(dtype)
    assert default_check(expected, rounded)
    rtol, _ = default_tolerances(dtype)
    assert not default_check(expected, expected * (1 + 3 * rtol) + 3 * rtol, rtol=rtol, atol=0.0)
    assert not default_check(expected, rounded[:1])
    assert not default_check((expected, expected), rounded)


def test_default_check_takes_outputs_by_name():
    one, two = torch.ones(4), torch.full((4,), 2.0)
    assert default_check({"out": one, "lse": two}, {"lse": two, "out": one})
    assert not default_check({"out": one, "lse": two}, {"lse": one, "out": two})
    assert not default_check({"out": one}, {"lse": one})
    assert not default_check({"out": one}, one[:2])


def test_default_check_sees_nan_mismatch_share_and_direction():
    expected = torch.ones(100)
    poisoned = expected.clone()
    poisoned[3] = float("nan")
    assert not default_check(expected, poisoned)
    assert default_check(poisoned, poisoned)
    assert default_check(expected, poisoned, max_mismatch_pct=1.0)
    assert not default_check(expected, -expected, atol=10.0)
    assert default_check(expected, -expected, atol=10.0, min_cos_sim=None)
    assert default_tolerances(torch.int32) == (0.0, 0.0)
    tokens = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert default_check(tokens, tokens * tokens.new_tensor([1, 1, 0]), max_mismatch_pct=34.0)
