"""Ranks as threads of one process, each with a GPU and a stream; several may share a GPU.

What a rank runs between two calls must load no kernel of PyTorch: CUDA loads a kernel at its first
launch and waits for running ones, which may wait for this rank. So results are compared on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.comm.comm_backend import ThreadBackend

TIMEOUT = 60.0  # seconds for which kernels wait

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_ranks(world_size: int, body: Callable[[ThreadBackend], Any]) -> list[Any]:
    """What ``body(backend)`` returns on each rank; the first error is raised."""
    backends = ThreadBackend.create(world_size, timeout=120)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            with torch.cuda.stream(torch.cuda.Stream()):
                results[rank] = body(backends[rank])
                torch.cuda.current_stream().synchronize()
        except threading.BrokenBarrierError:
            pass  # another rank has the reason
        except BaseException as error:
            errors.append(error)
            backends[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal random numbers on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def rank_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32 in the order of the ranks, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes on the CPU."""
    return tensor.cpu().contiguous().view(torch.uint8)
