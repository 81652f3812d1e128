"""Which of the collected tests run, and in which order.

- Without a GPU a test of kernels runs on the reference backend, which it does not test as such.
  A fixed sample of the cases of such a test function runs: a tenth, at least `LEAST_CASES`, in
  which every value of every parameter occurs. A case is chosen by a hash of its name, so that new
  cases do not move the others. `--full` runs all.
- What is marked `full` runs under `--full` only.
- ``--gpu-share i/n``: part `i` of `n` of the tests that a GPU decides, in parts of equal cost. Of a
  test function whose cases take more than `SECONDS_OF_A_FUNCTION` together, by `tests/costs/`, as
  many run as fit, but at least `LEAST_ON_A_GPU`, and again every value of every parameter occurs.
- ``--ranks 4,8``: of tests with a number of ranks, those with these numbers.
- Expensive tests come first, so that no worker is left alone with one at the end; those of a file
  follow each other, so that what they share is made once.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest
import torch

from tests.progress import USUAL_COST, function_of, known_costs

SAMPLED_SHARE, LEAST_CASES = 0.1, 4
SECONDS_OF_A_FUNCTION, LEAST_ON_A_GPU = 10.0, 3
EXPENSIVE = 2.0  # CPU seconds of one case
# Tests of these folders need no GPU unless they say so, by one of these marks or fixtures.
WITHOUT_GPU = ("tests/trace/", "tests/serve/", "tests/comm/")
MARKS, FIXTURES = ("gpu", "any_device", "alone"), ("device", "model")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-share",
        metavar="I/N",
        type=_share,
        help="only the tests that a GPU decides, part I of N (from 1)",
    )
    parser.addoption(
        "--ranks",
        metavar="N,...",
        type=lambda text: {int(number) for number in text.split(",")},
        help="of the tests with a number of ranks, only those with one of these",
    )


def _share(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"`--gpu-share` must be I/N with 1 <= I <= N, got {text}")
    return index, count


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Change `items` to what runs; the rest is reported as deselected."""
    costs, full = known_costs(), config.getoption("--full")

    def cost(item: pytest.Item) -> float:
        return costs.get(function_of(item.nodeid), USUAL_COST)

    chosen = [item for item in items if full or item.get_closest_marker("full") is None]
    if ranks := config.getoption("--ranks"):
        chosen = [item for item in chosen if ranks_of(item) in (None, *ranks)]
    if share := config.getoption("--gpu-share"):
        chosen = list(filter(is_decided_by_a_gpu, chosen))
        chosen = part(chosen if full else affordable(chosen, cost), *share, cost)
    elif not full and not torch.cuda.is_available():
        chosen = sample(chosen)
    chosen.sort(key=costly_files_first(chosen, cost))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def costly_files_first(
    items: list[pytest.Item], cost: Callable[[pytest.Item], float]
) -> Callable[[pytest.Item], tuple[float, str, float]]:
    """Key that sorts expensive tests by file, the file with the most expensive one first."""

    def file_of(item: pytest.Item) -> str:
        return item.nodeid.split("::", 1)[0]

    largest: dict[str, float] = defaultdict(float)
    for item in items:
        largest[file_of(item)] = max(largest[file_of(item)], cost(item))

    def key(item: pytest.Item) -> tuple[float, str, float]:
        if cost(item) < EXPENSIVE:
            return 0.0, "", 0.0
        return -largest[file_of(item)], file_of(item), -cost(item)

    return key


def ranks_of(item: pytest.Item) -> int | None:
    """The number of ranks of a case, or None where it has no such parameter."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("ranks", params.get("world_size"))


def is_decided_by_a_gpu(item: pytest.Item) -> bool:
    if item.nodeid.startswith("tests/unit/"):
        return False
    marked = any(item.get_closest_marker(mark) for mark in MARKS)
    marked = marked or any(fixture in item.fixturenames for fixture in FIXTURES)
    return marked or not item.nodeid.startswith(WITHOUT_GPU)


def part(
    items: list[pytest.Item], index: int, count: int, cost: Callable[[pytest.Item], float]
) -> list[pytest.Item]:
    """Part `index` of `count`: each test goes to the part that has the least to do so far."""
    sums, chosen = [0.0] * count, []
    for item in sorted(items, key=lambda item: (-cost(item), item.nodeid)):
        least = sums.index(min(sums))
        sums[least] += cost(item)
        if least == index - 1:
            chosen.append(item)
    kept = set(chosen)
    return [item for item in items if item in kept]


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """All tests but those of kernels, whose cases are sampled."""
    dropped: set[pytest.Item] = set()
    for found in _cases([item for item in items if "device" in item.fixturenames]):
        wanted = max(LEAST_CASES, round(SAMPLED_SHARE * len(found)))
        dropped |= set(found) - sample_of_cases(found, wanted)
    return [item for item in items if item not in dropped]


def affordable(items: list[pytest.Item], cost: Callable[[pytest.Item], float]) -> list[pytest.Item]:
    """All tests but cases of those functions that take too long on a GPU."""
    dropped: set[pytest.Item] = set()
    for found in _cases(items):
        wanted = max(LEAST_ON_A_GPU, int(SECONDS_OF_A_FUNCTION / cost(found[0])))
        if wanted < len(found):
            dropped |= set(found) - sample_of_cases(found, wanted)
    return [item for item in items if item not in dropped]


def _cases(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test function that has parameters."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            cases[function_of(item.nodeid)].append(item)
    return cases.values()


def sample_of_cases(items: list[pytest.Item], wanted: int) -> set[pytest.Item]:
    """A fixed part of the cases of one test function, with each value of each parameter."""
    in_order = sorted(items, key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))
    seen: set[tuple[str, str]] = set()
    chosen: list[pytest.Item] = []
    for item in in_order:
        values = {(name, repr(value)) for name, value in item.callspec.params.items()}
        if not values <= seen:
            seen |= values
            chosen.append(item)
    rest = [item for item in in_order if item not in chosen]
    return {*chosen, *rest[: max(0, wanted - len(chosen))]}
