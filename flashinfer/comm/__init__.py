"""Communication between GPUs: the interface that engines implement; no kernels yet."""
