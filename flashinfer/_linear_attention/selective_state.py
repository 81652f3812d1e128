"""Mamba's recurrent kernel, called with tensors in one form: [batch, tokens, heads, dim]."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..jit.mamba import SelectiveStateConfig, gen_selective_state_update_module


@functools.cache
def get_selective_state_kernel(config: SelectiveStateConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    module = gen_selective_state_update_module(config).build_and_load()
    return module.selective_state
