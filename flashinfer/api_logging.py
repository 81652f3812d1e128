"""The decorator of public functions, and the replay of the calls that it dumped."""

from ._instrument.decorator import _TRACE_REGISTRY as _TRACE_REGISTRY
from ._instrument.decorator import flashinfer_api as flashinfer_api
from ._instrument.experimental import ExperimentalWarning as ExperimentalWarning
from ._instrument.experimental import (
    experimental_auto_backends_allowed as experimental_auto_backends_allowed,
)
from ._instrument.experimental import flashinfer_experimental_api as flashinfer_experimental_api
from ._instrument.experimental import (
    require_experimental_auto_backends as require_experimental_auto_backends,
)
from ._instrument.experimental import (
    warn_experimental_backend_once as warn_experimental_backend_once,
)
from ._instrument.replay import replay_from_dump as replay_from_dump
from ._instrument.replay import replay_sequence as replay_sequence

__all__ = [
    "ExperimentalWarning",
    "clear_graph_dumps",
    "experimental_auto_backends_allowed",
    "flashinfer_api",
    "flashinfer_experimental_api",
    "flush_graph_dumps",
    "replay_from_dump",
    "replay_sequence",
    "require_experimental_auto_backends",
    "warn_experimental_backend_once",
]


def flush_graph_dumps(synchronize: bool = True) -> int:
    """Write the dumps that wait for a replay of a CUDA graph; their number, which is 0.

    A call in a capture is logged and not dumped, so that no dump waits. `synchronize` waits for the
    GPU where FlashInfer has dumps to write.
    """
    return 0


def clear_graph_dumps() -> int:
    """Forget the dumps that wait for a replay of a CUDA graph; their number, which is 0."""
    return 0
