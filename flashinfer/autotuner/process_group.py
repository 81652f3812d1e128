"""The process group whose processes tune together."""

from __future__ import annotations

from typing import Any

import torch

_group: Any = None


def set_autotune_process_group(group: torch.distributed.ProcessGroup | None) -> None:
    """Tune together with the processes of `group`, so that all choose the same candidates.

    The tuner averages each candidate's time over the group. Every process of the group must make
    the same tuned calls in the same order. A CPU group (gloo) keeps the exchange off the stream
    that is measured.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        None makes this process tune alone again.
    """
    global _group
    _group = group


def get_autotune_process_group() -> torch.distributed.ProcessGroup | None:
    """The group that `set_autotune_process_group` has set."""
    return _group


def gathered(values: list[Any]) -> list[list[Any]]:
    """One list for each process of the group, or `values` alone without a group."""
    if _group is None:
        return [values]
    lists: list[Any] = [None] * torch.distributed.get_world_size(_group)
    torch.distributed.all_gather_object(lists, values, group=_group)
    return lists
