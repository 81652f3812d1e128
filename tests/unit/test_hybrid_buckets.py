"""Numbers of tokens that engines tune for."""

from __future__ import annotations

import pytest

from flashinfer.fused_moe.utils import (
    get_hybrid_num_tokens_buckets,
    make_hybrid_bucket_mapper,
    map_to_hybrid_bucket,
    map_to_hybrid_bucket_uncapped,
)

ALL = (
    *(2**i for i in range(9)),
    *range(512, 2049, 256),
    *range(2560, 4097, 512),
    8192,
    16384,
)


def test_buckets_end_with_the_largest_number():
    assert get_hybrid_num_tokens_buckets(16384) == ALL
    assert get_hybrid_num_tokens_buckets(1) == (1,)
    assert get_hybrid_num_tokens_buckets(1000, 100) == (128, 256, 512, 768, 1000)


def test_a_number_gets_the_next_bucket():
    for x in range(1, 9000):
        expected = next(size for size in ALL if size >= x)
        assert map_to_hybrid_bucket_uncapped(x) == expected
        assert map_to_hybrid_bucket(x, 3000) == min(expected, 3000)
    assert make_hybrid_bucket_mapper(100)(70) == 100


def test_wrong_numbers_are_refused():
    for arguments in ((0,), (8, 9), (8, 0)):
        with pytest.raises(ValueError, match="num_tokens`"):
            get_hybrid_num_tokens_buckets(*arguments)
    with pytest.raises(TypeError, match="`max_num_tokens`"):
        get_hybrid_num_tokens_buckets(8.0)  # type: ignore[arg-type]
