"""Trace templates: what each operation computes, stated once.

See `flashinfer.trace.template` for the classes and ``docs/trace.md`` for how to add one.
"""

from .template import Const, Scalar, Tensor, TraceTemplate, Var

__all__ = ["Const", "Scalar", "Tensor", "TraceTemplate", "Var"]
