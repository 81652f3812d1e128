"""The page pool: reference counts, keys, eviction."""

from __future__ import annotations

import random

import pytest

from examples.serve.cache import PagePool, page_keys


def test_keys_are_of_everything_up_to_a_page():
    tokens = list(range(10))
    keys = page_keys(tokens, 4)
    assert len(keys) == 2 == len(set(keys))
    assert page_keys(tokens[:8], 4) == keys and page_keys(tokens[:7], 4) == keys[:1]
    assert page_keys(tokens[4:], 4, parent=keys[0]) == keys[1:]
    # The same second page after another first one.
    assert page_keys([9, 1, 2, 3, *tokens[4:]], 4)[1] != keys[1]
    # Lists whose elements run together the same way as digits.
    assert page_keys([1, 23], 2) != page_keys([12, 3], 2)


def test_a_shared_page_is_free_when_its_last_user_left():
    pool = PagePool(2)
    page = pool.allocate()
    assert page is not None and pool.share(b"key") is None
    pool.publish(page, b"key")
    assert pool.share(b"key") == page
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    # It can still be found, and is in use again then.
    assert pool.share(b"key") == page and pool.num_free == 1


def test_pages_with_keys_are_taken_last_and_the_oldest_first():
    pool = PagePool(3)
    a, b, c = (pool.allocate() for _ in range(3))
    assert {a, b, c} == {0, 1, 2} and pool.allocate() is None
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    for page in (a, b, c):
        pool.release([page])
    assert [pool.allocate() for _ in range(3)] == [c, a, b]
    assert pool.share(b"a") is None and pool.share(b"b") is None


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning():
    pool = PagePool(2)
    pages = [pool.allocate(), pool.allocate()]
    for page, key in zip(pages, (b"first", b"second"), strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.allocate() == pages[1] and pool.share(b"first") == pages[0]


def test_a_key_keeps_its_first_page():
    pool = PagePool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.publish(a, b"key")
    pool.publish(b, b"key")
    assert pool.share(b"key") == a
    pool.release([b])
    assert pool.allocate() == b


def test_random_use_keeps_the_count_of_users():
    """Against a model that knows no more than the users of each page."""
    rng = random.Random(1)
    pool = PagePool(8)
    held: list[list[int]] = []
    keys: dict[bytes, int] = {}
    for step in range(3000):
        action = rng.random()
        if action < 0.4:
            page = pool.allocate()
            in_use = {p for pages in held for p in pages}
            assert (page is None) == (len(in_use) == 8) and page not in in_use
            if page is not None:
                held.append([page])
                keys = {key: p for key, p in keys.items() if p != page}
                if rng.random() < 0.5:
                    keys[b"%d" % step] = page
                    pool.publish(page, b"%d" % step)
        elif action < 0.6 and keys:
            key = rng.choice(list(keys))
            assert pool.share(key) == keys[key]
            held.append([keys[key]])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        assert pool.num_free == 8 - len({p for pages in held for p in pages})


def test_a_pool_needs_a_page():
    with pytest.raises(ValueError, match="`num_pages` must be at least 1, got 0"):
        PagePool(0)
