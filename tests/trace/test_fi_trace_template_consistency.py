"""Every public operation has a template, and every template fits its function."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.fi_trace import qualified_name
from flashinfer.trace.specs import Const, Scalar, Tensor, Var, argument_of
from tests.trace.calls import Operation, import_all_public_modules, operations, parameters_of

OPERATIONS = operations()
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.label)


# In plain PyTorch: the order of a weight, the factor of a tensor.
OF_PYTORCH = {"reorder_rows_for_gated_act_gemm", "make_nvfp4_global_scale"}
# Calls operations of other names, with its arguments in another form.
BY_OTHERS = {
    "xqa",
    "nvfp4_quantize_paged_kv_cache",
    "RecurrentKDAPrefillWrapper",
    "prepare_bf16_kda_prefill",
    "prepare_tf32_kda_prefill",
}


def _public_callables():
    """Functions of the package's namespace, and methods of its classes, by name."""
    import_all_public_modules()
    for name in dir(flashinfer):
        value = getattr(flashinfer, name)
        if (
            name.startswith("_")
            or name in OF_PYTORCH | BY_OTHERS
            or not getattr(value, "__module__", "").startswith("flashinfer")
        ):
            continue
        if hasattr(value, "refuses_every_call") or name.startswith("supports_"):
            continue
        if inspect.isfunction(value) and not name.endswith("_plan"):
            yield name, value
        elif inspect.isclass(value):
            for method, function in vars(value).items():
                # Other methods prepare a run, or are names that call it with an option.
                if method == "run_return_lse":
                    continue
                if inspect.isfunction(function) and method.startswith("run"):
                    yield f"{name}.{method}", function


def test_the_walk_finds_the_operations():
    """The walk that the next test relies on sees functions that are known to be public."""
    names = {name for name, _ in _public_callables()}
    assert {"rmsnorm", "fused_add_rmsnorm_quant", "silu_and_mul", "fi_trace"} <= names
    assert len(OPERATIONS) >= 11


def test_every_public_operation_has_a_template():
    """A decorated function without template, or a function of tensors without decorator, fails."""
    missing = []
    for name, function in _public_callables():
        annotations = [str(p.annotation) for p in parameters_of(function).values()]
        takes_tensors = any("Tensor" in annotation for annotation in annotations)
        is_public = not name.rpartition(".")[2].startswith("_")
        decorated = hasattr(function, "__flashinfer_trace__")
        if (decorated or (takes_tensors and is_public)) and not getattr(
            function, "__flashinfer_trace__", None
        ):
            missing.append(name)
    assert not missing, f"without trace template: {', '.join(missing)}"


def _named(operation: Operation) -> set[str]:
    """The names that inputs, outputs and options of the template can have."""
    named = set(parameters_of(operation.function))
    if operation.template.gather is not None:
        named |= {*operation.template.gathered(operation.arguments())}
        named |= {*inspect.signature(operation.template.reference).parameters}
    return named


@each_operation
def test_arguments_named_by_the_template_exist(operation: Operation):
    template, available = operation.template, _named(operation)
    mismatches = [
        f"input {key!r}: argument {spec.param or key!r}"
        for key, spec in template.inputs.items()
        if (spec.param or key) not in available
    ]
    mismatches += [
        f"output {key!r}: argument {spec.param!r}"
        for key, spec in template.outputs.items()
        if spec.param is not None and spec.param not in available
    ]
    beside = *template.hints, *template.unsupported
    mismatches += [f"hint {hint!r}" for hint in beside if hint not in available]
    assert not mismatches, f"{mismatches} not in {list(available)}"


@each_operation
def test_every_argument_is_accounted_for(operation: Operation):
    """Nothing can be passed that the definition, the destinations and the hints ignore."""
    template = operation.template
    known = {spec.param or key for key, spec in {**template.inputs, **template.outputs}.items()}
    known |= {*template.axes, *template.hints, *template.unsupported, *template.options}
    known |= (
        {"generator"} if "generator" in inspect.signature(template.reference).parameters else set()
    )
    known |= {s.dtype_from_scalar for s in template.outputs.values() if isinstance(s, Tensor)}
    if template.gather is not None:
        call = _Recorder(inspect.signature(operation.function).bind(**operation.arguments()))
        template.gather(call)
        # Additional arguments of a user's variant, for which there is no reference.
        known |= {*call.read, "return_lse", "args"}
    ignored = set(parameters_of(operation.function)) - known
    assert not ignored, f"arguments without meaning: {sorted(ignored)}"


@each_operation
def test_what_kernels_alone_know_is_refused_by_name(operation: Operation):
    """A tensor that the reference does not know, or a flag in its place, is not left aside."""
    template = operation.template
    call = inspect.signature(operation.function).bind(**operation.arguments())
    call.apply_defaults()
    for name in template.unsupported:
        for value in (torch.ones(1), True, 3):
            message = (
                f"`{name}` must be None with the reference backend, got {type(value).__name__}"
            )
            with pytest.raises(ValueError, match=message):
                template.validate({**call.arguments, name: value})


class _Recorder(dict):
    """A call's arguments, defaults included, and which of them were read."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        super().__init__(bound.arguments)
        self.read: set[str] = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


@each_operation
def test_reference_takes_what_it_reads(operation: Operation):
    """Its parameters are public ones, in order and with their defaults, and each is read.

    A destination, or its dtype, that the caller has to provide may stand there unread: that it is
    required is what the parameter says.
    """
    if operation.template.gather is not None:
        taken = inspect.signature(operation.template.reference).parameters.values()
        required = {p.name for p in taken if p.default is inspect.Parameter.empty}
        assert required <= set(operation.template.gathered(operation.arguments()))
        return
    public = inspect.signature(operation.function).parameters
    reference = inspect.signature(operation.template.reference).parameters
    assert [name for name in public if name in reference] == list(reference)
    assert all(public[name].default == p.default for name, p in reference.items())
    unread = set(reference) - _names_read(operation.template.reference)
    outputs = operation.template.outputs.items()
    destinations = {spec.param or key for key, spec in outputs}
    destinations |= {getattr(spec, "dtype_from_scalar", None) for _, spec in outputs}
    assert unread <= destinations
    assert all(reference[name].default is inspect.Parameter.empty for name in unread)


def _names_read(function: Any) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@each_operation
def test_reference_states_formula_and_source(operation: Operation):
    docstring = operation.template.reference.__doc__ or ""
    assert "Source:" in docstring
    assert "=" in docstring or "as" in docstring


@each_operation
def test_every_constant_axis_has_a_source(operation: Operation):
    template = operation.template
    in_tensors = {
        axis
        for spec in {**template.inputs, **template.outputs}.values()
        for axis in getattr(spec, "dim_names", ())
    }
    for axis, kind in template.axes.items():
        if isinstance(kind, Const):
            from_call = axis in in_tensors or axis in _named(operation)
            assert from_call or kind.value is not None or kind.derive, f"{axis} has no value"


@each_operation
def test_dtype_sources_exist(operation: Operation):
    template = operation.template
    known = {*template.inputs, *_named(operation)}
    for key, spec in {**template.inputs, **template.outputs}.items():
        if isinstance(spec, Tensor):
            for source in (spec.dtype_from, spec.dtype_from_scalar):
                assert source is None or source in known, f"{key}: {source}"
            for name in [spec.dtype, *(spec.dtypes or ())]:
                assert name is None or isinstance(getattr(torch, name), torch.dtype)


@each_operation
def test_axes_of_outputs_are_axes_of_inputs_or_derived(operation: Operation):
    """Otherwise the size of an output could not be told from a call."""
    template = operation.template
    known = {a for s in template.inputs.values() for a in getattr(s, "dim_names", ())}
    known |= {a for a, k in template.axes.items() if isinstance(k, Const) and (k.derive or k.value)}
    known |= {a for a, k in template.axes.items() if isinstance(k, Var) and k.from_values}
    known |= _named(operation)
    for key, spec in template.outputs.items():
        assert set(getattr(spec, "dim_names", ())) <= known, key


@each_operation
def test_a_call_has_a_complete_definition(operation: Operation):
    template = operation.template
    arguments = operation.arguments()
    definition = operation.api.fi_trace(**arguments)
    assert definition["name"].startswith(template.name_prefix)
    passed = {
        key
        for key, spec in template.inputs.items()
        if not spec.optional or argument_of(key, spec, template.gathered(arguments)) is not None
    }
    assert set(definition["inputs"]) == passed
    assert len(definition["outputs"]) == len(template.outputs)
    for entry in [*definition["inputs"].values(), *definition["outputs"].values()]:
        assert isinstance(getattr(torch, entry["dtype"]), torch.dtype)
    for axis, entry in definition["axes"].items():
        assert entry["type"] == ("const" if isinstance(template.axes[axis], Const) else "var")
        assert entry["type"] == "var" or entry["value"] > 0
    assert f"fi_api:{qualified_name(operation.function)}" in definition["tags"]
    ast.parse(definition["reference"])


def test_prefixes_are_unique():
    """Two operations must not write one file."""
    prefixes = [operation.template.name_prefix for operation in OPERATIONS]
    assert len(prefixes) == len(set(prefixes))


@each_operation
def test_scalars_are_bounded_by_the_public_function(operation: Operation):
    """Every scalar refuses NaN and a wrong type by name, in the wording of the checks."""
    arguments = operation.template.gathered(operation.arguments())
    kind = type(arguments)
    usual = {
        spec.param or key: 1e-6
        for key, spec in operation.template.inputs.items()
        if isinstance(spec, Scalar) and (spec.param or key).endswith(("eps", "center"))
    }
    arguments = {**usual, **arguments, "eps": 1e-6}
    for key, spec in operation.template.inputs.items():
        if not isinstance(spec, Scalar):
            continue
        name = spec.param or key
        with pytest.raises(ValueError, match=name):
            operation.template.validate(kind({**arguments, name: float("nan")}))
        with pytest.raises(TypeError, match=name):
            operation.template.validate(kind({**arguments, name: "one"}))
