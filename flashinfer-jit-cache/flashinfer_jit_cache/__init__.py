"""Compiled modules of flashinfer-python, in `jit_cache/`; it looks here before it compiles."""
