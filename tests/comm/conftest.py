"""Tests whose ranks are threads run in a child process.

A kernel that waits in vain ends the process's CUDA context, and every later test in it would fail.
All tests of a process share one child.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.comm.child import call_test, prepare

_children: list[ProcessPoolExecutor] = []


def _child() -> ProcessPoolExecutor:
    if not _children:
        context = multiprocessing.get_context("spawn")
        _children.append(ProcessPoolExecutor(1, mp_context=context, initializer=prepare))
    return _children[0]


def _end_child() -> None:
    while _children:
        child = _children.pop()
        for process in list((child._processes or {}).values()):
            process.kill()  # it may wait for a kernel
        child.shutdown(wait=False, cancel_futures=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where other processes share the GPU in turns, ranks wait for each other too long."""
    if getattr(getattr(item, "module", None), "IN_A_CHILD", False):
        item.add_marker("alone")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    module = pyfuncitem.module
    if not getattr(module, "IN_A_CHILD", False):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    call = _child().submit(call_test, module.__name__, pyfuncitem.originalname, arguments)
    try:
        call.result(timeout=3600 if pyfuncitem.config.getoption("--full") else 300)
    except BaseException as error:
        _end_child()
        if isinstance(error, BrokenProcessPool):
            pytest.fail("the process of the ranks died")
        raise
    return True


@pytest.fixture(scope="session", autouse=True)
def _child_ends() -> Iterator[None]:
    """In a fork as well, which has no end of the session."""
    yield
    _end_child()
