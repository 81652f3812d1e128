"""NumPy's numbers as Python's: engines compute page sizes, counts and scales with either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """`value`, or Python's int, float or bool for one of NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, `plain`; so is what stands in ``*args``."""
    return {
        name: tuple(map(plain, value)) if type(value) is tuple else plain(value)
        for name, value in arguments.items()
    }
