"""Trace templates: what each operation computes, stated once.

See `flashinfer.trace.specs` and `flashinfer.trace.template` for the classes, and ``docs/trace.md``
for how to add one.
"""

from .check import default_check, default_tolerances, standard_check
from .solution import BuildSpec, Solution, SourceFile, SupportedBindings, SupportedLanguages
from .specs import Const, Scalar, Tensor, Var
from .template import TraceTemplate

__all__ = [
    "BuildSpec",
    "Const",
    "Scalar",
    "Solution",
    "SourceFile",
    "SupportedBindings",
    "SupportedLanguages",
    "Tensor",
    "TraceTemplate",
    "Var",
    "default_check",
    "default_tolerances",
    "standard_check",
]
