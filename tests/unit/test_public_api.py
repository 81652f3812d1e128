"""Public names keep the parameters that callers of FlashInfer pass: order, kind and default."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import operator
from pathlib import Path
from typing import Any

import pytest

EXPECTED = [
    tuple(line.split(": ", 1))
    for line in Path(__file__).with_name("public_api.txt").read_text().splitlines()
    if not line.startswith("#")
]

_MADE_BY = "the functions that make it know its arguments"
_FABRIC = "fabric memory is refused, whatever the arguments"
EXCEPTIONS = {
    "flashinfer.BatchMLAPagedAttentionWrapper.run": "engines probe for ckv_scale_arr",
    "flashinfer.kda_decode.recurrent_kda": "has the arguments of flashinfer.kda",
    "flashinfer.fused_moe.runners.MoERunner.__init__": "a runner is made for one layer",
    "flashinfer.autotuner.OptimizationProfile.__init__": "tensor_initializers may be left out",
    "flashinfer.jit.JitSpec.__init__": _MADE_BY,
    "flashinfer.jit.JitSpecNvcc.__init__": _MADE_BY,
    "flashinfer.jit.JitSpecNvcc.build": "every build takes the lock",
    "flashinfer.jit.build_jit_specs": "verbose is by default what FLASHINFER_JIT_VERBOSE says",
    "flashinfer.aot.compile_and_package_modules": "takes modules, not options",
    "flashinfer.gemm.PreparedBatchDeepGemmFp8NtGroupwise.__init__": _MADE_BY,
    "flashinfer.gemm.PreparedGroupGemmFp8NtGroupwiseContiguous.__init__": _MADE_BY,
    "flashinfer.gemm.PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant.__init__": _MADE_BY,
    "flashinfer.comm.mnnvl.McastGPUBuffer.__init__": _FABRIC,
    "flashinfer.comm.mnnvl.MnnvlMemory.__init__": _FABRIC,
    "flashinfer.comm.mnnvl.SymmDeviceMemory.__init__": _FABRIC,
}
"""Names, in the first of their modules, whose parameters are others, and why."""


def _expected_parameters(signature: str) -> list[tuple[str, str, str | None]]:
    """Name, kind and source of the default of each parameter of ``f(a, *, b=None)``."""
    definition = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    first = len(arguments.posonlyargs)
    positional = arguments.posonlyargs + arguments.args
    defaults: list[Any] = [None] * (len(positional) - len(arguments.defaults))
    found = [
        (argument.arg, "first" if i < first else "positional", default and ast.unparse(default))
        for i, (argument, default) in enumerate(
            zip(positional, defaults + arguments.defaults, strict=True)
        )
    ]
    if arguments.vararg is not None:
        found.append((arguments.vararg.arg, "*", None))
    found += [
        (argument.arg, "keyword", default and ast.unparse(default))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, "**", None))
    return found


def _parameters(function: Any) -> list[tuple[str, str, str | None]]:
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "first",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        (parameter.name, kinds[parameter.kind], _source(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self" or function.__qualname__ == "fast_decode_plan"
    ]


def _source(default: Any) -> str | None:
    if default is inspect.Parameter.empty:
        return None
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    return (
        "..."
        if repr(default).startswith("<")
        else ast.unparse(ast.parse(repr(default), mode="eval"))
    )


def missing_parameters(signature: str, function: Any) -> list[str]:
    """What a caller that goes by `signature` would trip over."""
    expected, ours = _expected_parameters(signature), _parameters(function)
    complaints = []
    for (name, kind, default), mine in zip(expected, ours, strict=False):
        same_default = default == mine[2] or (default == "..." and mine[2] is not None)
        if (name, kind) != mine[:2] or not same_default:
            complaints.append(f"expected {name} ({kind}, default {default}), is {mine}")
    complaints += [f"{name} is missing" for name, _, _ in expected[len(ours) :]]
    complaints += [
        f"{name} is new and has no default"
        for name, kind, default in ours[len(expected) :]
        if default is None and kind in ("positional", "keyword")
    ]
    return complaints


def _place(modules: str, signature: str) -> str:
    return f"{modules.split()[0]}.{signature.split('(', 1)[0]}"


def _complaints(modules: str, signature: str) -> list[str]:
    name, parameters = signature.split("(", 1)
    return [
        f"{module}.{name}: {complaint}"
        for module in modules.split()
        for complaint in missing_parameters(
            f"f({parameters}", operator.attrgetter(name)(importlib.import_module(module))
        )
    ]


@pytest.mark.parametrize(("modules", "signature"), EXPECTED, ids=[name for _, name in EXPECTED])
def test_signature(modules: str, signature: str) -> None:
    if _place(modules, signature) not in EXCEPTIONS:
        assert not _complaints(modules, signature)


def test_exceptions_are_some() -> None:
    others = {_place(*row) for row in EXPECTED if _complaints(*row)}
    assert others == set(EXCEPTIONS)


def test_what_the_list_covers() -> None:
    assert len(EXPECTED) > 1000
    families = {module for modules, _ in EXPECTED for module in modules.split()}
    assert len(families) >= 100


@pytest.mark.parametrize(
    "signature",
    [
        "f(a, b=1, *, c=None)",
        "f(b, a=1, *, c=None)",
        "f(a, b=2, *, c='NHD')",
        "f(a, b, *, c='NHD')",
        "f(a, b=2, c=None)",
        "f(a, b=2, *, d=None)",
        "f(a, b=2, *, c=None, d=None)",
        "f(a)",
    ],
)
def test_every_kind_of_difference_is_seen(signature: str) -> None:
    def ours(a: int, b: int = 2, *, c: Any = None) -> None:
        del a, b, c

    def needs_more(a: int, b: int) -> None:
        del a, b

    assert not missing_parameters("f(a, b=2, *, c=None)", ours)
    assert not missing_parameters("f(a, b=2)", ours)
    assert missing_parameters(signature, needs_more if signature == "f(a)" else ours)
