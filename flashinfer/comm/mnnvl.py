"""Multi-node NVLink's module in FlashInfer; only the interface is here."""

from .abstractions import CommBackend as CommBackend
