"""Benchmark definitions from calls: ``fi_trace(flashinfer.rmsnorm, input=x, weight=w)``."""

from ._instrument.definitions import build_fi_trace_fn as build_fi_trace_fn
from ._instrument.definitions import fi_trace as fi_trace
from ._instrument.definitions import qualified_name as qualified_name
from ._instrument.definitions import register_fi_trace as register_fi_trace
from ._instrument.definitions import save_definition as save_definition

__all__ = [
    "build_fi_trace_fn",
    "fi_trace",
    "qualified_name",
    "register_fi_trace",
    "save_definition",
]
