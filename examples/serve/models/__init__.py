"""The models that can be served: a file each, found by the architectures that it names.

To add one, write a file here with a class derived from `Decoder`; there is no list to extend.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from .decoder import Decoder


@cache
def architectures() -> dict[str, type[Decoder]]:
    """The class of each architecture, by its name in ``config.json``."""
    found: dict[str, type[Decoder]] = {}
    for module in pkgutil.iter_modules(__path__):
        content = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for item in content.values():
            if isinstance(item, type) and issubclass(item, Decoder):
                found |= dict.fromkeys(vars(item).get("architectures", ()), item)
    return dict(sorted(found.items()))
