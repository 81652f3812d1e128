"""A small continuous-batching engine: `flashinfer` between the matrix products."""
