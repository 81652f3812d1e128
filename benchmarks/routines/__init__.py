"""The routines, one module per family of operations. A new family is a new file here."""

import importlib
import pkgutil

from .base import ROUTINES as ROUTINES
from .base import Backend as Backend
from .base import Flag as Flag
from .base import Routine as Routine
from .base import register as register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
