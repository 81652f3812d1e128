"""Helpers of the functions that score tokens for sparse attention."""
