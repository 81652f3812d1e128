"""Checks of backends and devices, by the names that callers of FlashInfer know."""
