"""Attention over sequences that are divided among GPUs: Ulysses, ring attention and both."""

from .parallel_attention import ParallelAttention as ParallelAttention
from .parallel_config import UnevenCPConfig as UnevenCPConfig
from .parallel_config import VarlenCPConfig as VarlenCPConfig
from .utils import get_parallel_groups as get_parallel_groups
from .utils import ring_varlen_config as ring_varlen_config
from .utils import split_varlen_input as split_varlen_input
from .utils import ulysses_varlen_config as ulysses_varlen_config
from .utils import uneven_cp_config as uneven_cp_config

__all__ = [
    "ParallelAttention",
    "UnevenCPConfig",
    "VarlenCPConfig",
    "get_parallel_groups",
    "ring_varlen_config",
    "split_varlen_input",
    "ulysses_varlen_config",
    "uneven_cp_config",
]
