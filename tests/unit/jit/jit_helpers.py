"""A small project that compiles in a fraction of a second, and processes that run together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashinfer import jit

# The FFI's C interface by hand: its C++ headers would take two seconds.
HOST_SOURCE = """
#include <tvm/ffi/c_api.h>
#include <answer.h>
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = ANSWER;
  return 0;
}
"""
CUDA_SOURCE = """
__global__ void store(int* p) { *p = 1; }
cudaError_t launch_store(int* p) {
  store<<<1, 1>>>(p);
  return cudaGetLastError();
}
"""


@dataclass
class Project:
    """Sources of a module in a folder of their own."""

    root: Path

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def spec(self, name: str = "answer", sources: tuple[str, ...] = ("answer.cc",), **options):
        options.setdefault("extra_include_paths", [self.root / "include"])
        options.setdefault("use_fast_math", False)
        return jit.gen_jit_spec(name, [self.root / s for s in sources], **options)

    def cuda_spec(self, name: str = "cuda_answer", **options):
        return self.spec(name, ("answer.cc", "store.cu"), **options)


def make_project(root: Path) -> Project:
    project = Project(root)
    project.write("answer.cc", HOST_SOURCE)
    project.write("include/answer.h", "#include <deeper.h>\n#define ANSWER 40 + MORE\n")
    project.write("include/deeper.h", "#define MORE 2\n")
    project.write("store.cu", CUDA_SOURCE)
    return project


def in_processes(count: int, function: Callable[[], object]) -> list[multiprocessing.Process]:
    """Start forks of this process: no import to wait for, so that they really run together."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function) for _ in range(count)]
    for process in processes:
        process.start()
    return processes
