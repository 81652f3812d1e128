"""Packed masks as kernels read them: by words of four bytes."""

from __future__ import annotations

import pytest
import torch

from flashinfer._attention.plan.masks import in_whole_words


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("begin", range(4))
def test_their_memory_ends_with_a_word(count: int, begin: int) -> None:
    memory = torch.randint(256, (begin + count,), dtype=torch.uint8)
    bits = in_whole_words(memory[begin:])
    storage = bits.untyped_storage()
    last_word = (bits.data_ptr() + count - 1) // 4 * 4
    assert torch.equal(bits, memory[begin:])
    assert storage.data_ptr() <= bits.data_ptr() // 4 * 4
    assert last_word + 4 <= storage.data_ptr() + storage.nbytes()


def test_what_ends_so_is_not_copied() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    for bits in (memory, memory[3:8], memory[:13]):
        assert in_whole_words(bits).data_ptr() == bits.data_ptr()
