"""Helpers of all families: loaded kernels, checks of arguments, dtypes, devices."""
