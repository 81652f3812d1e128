"""How an all-reduce is cut: which protocol, and the shape of its grid."""

from __future__ import annotations

from typing import NamedTuple

VEC_BYTES = 16
MAX_ROW_BYTES = 512 * 4 * VEC_BYTES

# Bytes of the whole tensor up to which one-shot is taken, by world size. With two ranks both
# protocols move the same bytes, and one-shot waits once.
ONE_SHOT_BYTES = {2: 1 << 62, 3: 768 << 10, 4: 512 << 10, 5: 384 << 10, 6: 384 << 10, 7: 256 << 10}
ONE_SHOT_BYTES_OF_MANY = 256 << 10  # 8 ranks and more


class Schedule(NamedTuple):
    """The fields of AllReduceSchedule."""

    one_shot: bool
    threads: int
    vecs_per_thread: int
    num_ctas: int


def takes_one_shot(num_bytes: int, world_size: int) -> bool:
    """Whether one-shot is the faster protocol."""
    return num_bytes <= ONE_SHOT_BYTES.get(world_size, ONE_SHOT_BYTES_OF_MANY)


def half_bytes(num_bytes: int, world_size: int, force_one_shot: bool = False) -> int:
    """Receive buffer that all-reduces of up to `num_bytes` need: a row of any size included."""
    one_shot = num_bytes
    if not (force_one_shot or takes_one_shot(num_bytes, world_size)):
        one_shot = min(num_bytes, ONE_SHOT_BYTES.get(world_size, ONE_SHOT_BYTES_OF_MANY))
    needed = (world_size - 1) * one_shot
    if world_size > 2 or not force_one_shot:
        # Rows are dealt to owners in whole ones, up to world_size - 1 of them empty.
        padded = num_bytes + world_size * MAX_ROW_BYTES
        needed = max(needed, 2 * padded)
    return needed


def row_schedule(
    rows: int, row_bytes: int, one_shot: bool, world_size: int, max_ctas: int, shared: bool
) -> Schedule:
    """For rows that a CTA holds whole."""
    vecs = row_bytes // VEC_BYTES
    per_thread = 1 if vecs <= 512 else 2 if vecs <= 1024 else 4
    threads = -(-vecs // per_thread)
    threads = -(-threads // 32) * 32
    groups = rows if one_shot else -(-rows // world_size)
    resident = max_ctas if shared else max_ctas * (2048 // threads)
    return Schedule(one_shot, threads, per_thread, min(groups, resident))


def flat_schedule(
    num_bytes: int, one_shot: bool, world_size: int, max_ctas: int, shared: bool
) -> Schedule:
    """For a flat tensor, cut into chunks of `threads * vecs_per_thread` vectors."""
    vecs = num_bytes // VEC_BYTES
    threads, per_thread = (128 if vecs <= 16 * 128 else 256), 1
    chunks = -(-vecs // (threads * per_thread))
    groups = chunks if one_shot else -(-chunks // world_size)
    resident = max_ctas if shared else max_ctas * (2048 // threads)
    return Schedule(one_shot, threads, per_thread, max(1, min(groups, resident)))
