"""A small continuous-batching engine: `flashinfer` between the matrix products."""

import os

# Which of PyTorch's ways to cuBLAS is taken, read when it is imported: for the few rows of a decode
# step this one chooses the faster kernels (docs/tuning/serving_step.md).
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
