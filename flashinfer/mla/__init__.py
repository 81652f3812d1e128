"""Multi-head latent attention: the name that engines import; no kernels yet."""

from .wrapper import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
