"""Whether callers can compile kernels of cuTile; no kernel of this package is one."""

from .._common.cuda_tile import is_cuda_tile_available as is_cuda_tile_available
