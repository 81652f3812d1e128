"""What every test shares: a fixed seed, `--full`, clear reasons for what cannot run here."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from tests import forked, progress, selection

SEED = 20240229

# Threads of torch for each test process, and for what it starts: more threads than cores wait for
# each other actively, which took seven times the time of the attention tests. A worker of
# pytest-xdist inherits what its controller set for itself, hence the smaller number.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_SHARE = max(1, len(os.sched_getaffinity(0)) // _PROCESSES)
_THREADS = min(_SHARE, int(os.environ.get("OMP_NUM_THREADS", _SHARE)))
os.environ["OMP_NUM_THREADS"] = str(_THREADS)
torch.set_num_threads(_THREADS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="the whole parameter grid of each test, not the default part",
    )
    progress.add_options(parser)
    forked.add_options(parser)
    selection.add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    progress.register(config)
    forked.register(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.select(config, items)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given: tests then run the grid that is left out by default."""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, on the CPU and on the GPU."""
    random.seed(SEED)
    if torch.cuda.is_available():
        torch.manual_seed(SEED)
    else:  # `torch.manual_seed` would note the caller's stack, for a GPU that may begin later
        torch.default_generator.manual_seed(SEED)
    return SEED


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The GPU where there is one; else the CPU, on which the reference backend does the work."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from flashinfer.reference_backend import reference_backend

    with reference_backend():
        yield torch.device("cpu")


@pytest.fixture
def fuzz_part() -> int | None:
    """Which part of a fuzzer's cases: under `--full` each is a test, so that they run at once."""
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fuzz_part" in metafunc.fixturenames and metafunc.config.getoption("--full"):
        from tests.fuzzing import FULL_PARTS

        parts = range(FULL_PARTS)
        metafunc.parametrize("fuzz_part", parts, ids=[f"{i + 1} of {FULL_PARTS}" for i in parts])


@pytest.fixture
def fuzz_run(
    device: torch.device,
    full: bool,
    fuzz_part: int | None,
    capsys: pytest.CaptureFixture[str],
):
    """What `tests.fuzzing.run_fuzz` needs to know about this run."""
    from tests.fuzzing import FuzzRun

    def tell(line: str) -> None:
        with capsys.disabled():
            print("\n" + line)

    return FuzzRun(device, full, fuzz_part, tell)


def _no_gpu_reason() -> str | None:
    if torch.version.cuda is None:
        return f"needs a GPU: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch sees no CUDA device (torch.cuda.is_available() is False)"
    return None


def _no_compiler_reason() -> str | None:
    from flashinfer.jit.errors import ToolchainError
    from flashinfer.jit.toolchain import require_toolkit

    try:
        require_toolkit()
    except ToolchainError as error:
        return f"needs nvcc: {error}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason in (("gpu", _no_gpu_reason), ("compiler", _no_compiler_reason)):
        if item.get_closest_marker(marker) and (why := reason()):
            pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A GPU that is too small, or shared, is not a failure of the code under test."""
    try:
        return (yield)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        pytest.skip(f"out of GPU memory: {str(error).splitlines()[0]}")


def pytest_runtest_logfinish() -> None:
    """Like a fork, a worker of pytest-xdist ends with its CUDA context and is replaced."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        forked.exit_if_the_gpu_is_lost()
