"""Facades kept for callers of FlashInfer; no operation of this package uses them."""
