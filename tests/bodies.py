"""The body of a public function that is made of other operations, or of a wrapper, without a GPU.

On the reference backend a call of the function runs its reference. Its body is to be tested there
too: the kernels that it calls are then their references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flashinfer._instrument import routes


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs on a GPU when `function` is called."""
    own = inspect.unwrap(function)
    routes.route_registered()
    return next((route.kernel for route in routes._routes if route.function is own), function)
