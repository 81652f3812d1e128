"""Replay of dumped calls; a dump names functions to import, so replay only what you would run."""

from ._instrument.replay import replay_from_dump as replay_from_dump
from ._instrument.replay import replay_sequence as replay_sequence

__all__ = ["replay_from_dump", "replay_sequence"]
