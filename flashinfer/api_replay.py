"""Replay of dumped calls; loading a dump runs nothing that the dump names."""

from ._instrument.replay import replay_from_dump as replay_from_dump
from ._instrument.replay import replay_sequence as replay_sequence

__all__ = ["replay_from_dump", "replay_sequence"]
