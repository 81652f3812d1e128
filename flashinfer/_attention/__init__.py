"""Attention: plans, wrappers and functions below the public modules."""
