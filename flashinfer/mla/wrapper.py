"""The wrapper of multi-head latent attention; it refuses to be made."""

from __future__ import annotations

import torch

from ..compat.backends import only_elsewhere


class BatchMLAPagedAttentionWrapper:
    """Attention over a paged cache of latents; engines import the name on every GPU."""

    @only_elsewhere((80, 86, 89, 90, 100, 103, 110, 120, 121))
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None: ...
