"""Reads events that kernels wrote with ``flashinfer/profiler.cuh``, and shows them in Perfetto."""

from .events import EventType, decode_tag
from .perfetto import export_to_perfetto_trace

__all__ = ["EventType", "decode_tag", "export_to_perfetto_trace"]
