"""The decorator of public functions, and the replay of the calls that it dumped."""

from ._instrument.decorator import _TRACE_REGISTRY as _TRACE_REGISTRY
from ._instrument.decorator import flashinfer_api as flashinfer_api
from ._instrument.replay import replay_from_dump as replay_from_dump
from ._instrument.replay import replay_sequence as replay_sequence

__all__ = ["flashinfer_api", "replay_from_dump", "replay_sequence"]
