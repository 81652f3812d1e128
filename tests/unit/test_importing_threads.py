"""Names of the package that threads ask for first, at the same time."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from flashinfer._common.importing import missing_attribute


def test_a_package_and_another_that_imports_its_submodule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each thread would hold the lock of a module that the other one waits for."""
    files = {
        "late_root/__init__.py": "",
        "late_root/whole/__init__.py": "import time\ntime.sleep(0.4)\nfrom .part import found\n",
        "late_root/whole/part.py": "from . import other\nfound = 1\n",
        "late_root/whole/other.py": "",
        "late_root/user.py": "import time\ntime.sleep(0.1)\nfrom .whole.part import found\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    import late_root  # type: ignore[import-not-found]

    results: dict[str, object] = {}

    def ask(name: str) -> None:
        try:
            results[name] = missing_attribute(name, vars(late_root), {})
        except BaseException as error:  # what is to be seen
            results[name] = error

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("whole", "user")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in [name for name in sys.modules if name.startswith("late_root")]:
        del sys.modules[name]
    assert {name: getattr(found, "found", found) for name, found in results.items()} == {
        "whole": 1,
        "user": 1,
    }
