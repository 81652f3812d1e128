"""Descriptors of sealed libraries: their numbers never mean a file of the caller."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flashinfer.jit import sealed

# The first error of a process opens the files of all libraries by their names.
FIRST_ERROR = """
import sys, tempfile
from pathlib import Path
import tvm_ffi
from jit_helpers import make_project

for name in "answer", "other":
    assert make_project(Path(sys.argv[1])).spec(name).build_and_load().answer() == 42
empty = [tempfile.TemporaryFile() for _ in range(64)]  # they have every number that was free
try:
    tvm_ffi.get_global_func("ffi.Module.load_from_file.so")("/no such file", "so")
except Exception as error:
    print(error)
"""


def test_an_error_after_descriptors_were_used_again(project):
    """Libraries' names lead to no file of the caller's, which could be empty."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", FIRST_ERROR, str(project.root)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "no such file" in run.stdout


def test_a_place_that_somebody_closed(project):
    """Then its number belongs to others, and another one is taken."""
    project.spec().build_and_load()
    number = sealed._place._number
    read, write = os.pipe()
    os.dup2(write, number)
    assert project.spec("other").build_and_load().answer() == 42
    os.write(number, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read), os.close(write), os.close(number)


def test_paths_of_descriptors_never_come_again():
    read, write = os.pipe()
    names = [sealed._name_of(read) for _ in range(300)]
    assert len(set(names)) == 300
    assert all(os.path.samestat(os.stat(name), os.fstat(read)) for name in names)
    os.close(read), os.close(write)
