"""``@flashinfer_api`` levels 0 to 5, on CPU tensors."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch

from flashinfer._instrument import decorator
from flashinfer._instrument import text as api_log_text
from flashinfer.api_logging import flashinfer_api


@pytest.fixture
def log(monkeypatch, tmp_path):
    """Decorate at a level and read what was written."""

    class Log:
        path = tmp_path / "api.log"

        def decorate(self, level, func, trace=None):
            monkeypatch.setenv("FLASHINFER_LOGLEVEL", str(level))
            return flashinfer_api(func, trace=trace)

        def text(self):
            return self.path.read_text() if self.path.exists() else ""

    monkeypatch.setenv("FLASHINFER_LOGDEST", str(Log.path))
    return Log()


@pytest.fixture
def registry(monkeypatch):
    entries: list = []
    monkeypatch.setattr(decorator, "_TRACE_REGISTRY", entries)
    monkeypatch.setattr(decorator, "traced_functions", [])
    return entries


def add(x, y=1.0, *, out=None):
    """Add."""
    return x + y


def test_level_0_returns_the_function_itself(log):
    def func(x):
        return x

    assert log.decorate(0, func) is func
    assert func(3) == 3 and log.text() == ""


def test_bare_and_called_forms(monkeypatch):
    monkeypatch.delenv("FLASHINFER_LOGLEVEL", raising=False)

    def func(x):
        return x

    assert flashinfer_api(func) is func
    assert flashinfer_api()(func) is func
    assert flashinfer_api(trace=None)(func) is func


def test_level_is_read_at_decoration(log, monkeypatch):
    logged = log.decorate(1, add)
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "0")
    logged(torch.ones(1))
    assert "add" in log.text()


def test_level_1_writes_names_only(log):
    log.decorate(1, add)(torch.ones(2), 2.0)
    assert re.fullmatch(r"\[flashinfer [-0-9]+ [:.0-9]+ \d+\] #\d+ add\n", log.text())


def test_level_3_writes_inputs_then_outputs(log):
    x = torch.ones(4, 6, dtype=torch.bfloat16)[:, :3]
    log.decorate(3, add)(x, 2)
    called, returned = log.text().split(" returned ")
    described = "Tensor(shape=(4, 3), dtype=bfloat16, device=cpu, stride=(6, 1), contiguous=False)"
    assert f"  x = {described}\n  y = 2\n  out = None (default)\n" in called
    assert returned.startswith("Tensor(shape=(4, 3), dtype=bfloat16, device=cpu, stride=(3, 1)")
    assert "min=" not in log.text()


def test_level_5_counts_what_is_not_finite(log):
    x = torch.tensor([1.0, 2.0, 6.0, float("nan"), float("inf"), float("-inf")])
    log.decorate(5, add)(x, 0)
    assert log.text().count("min=1 max=6 mean=3 nan=1 inf=2") == 2


@pytest.mark.parametrize(
    "tensor, text",
    [
        (torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn), "min=-2 max=1 mean=-0.166667"),
        (torch.tensor([True, False, True, True]), "min=0 max=1 mean=0.75"),
        (torch.tensor([7, 9], dtype=torch.uint16), "min=7 max=9 mean=8"),
        (torch.tensor([-3, 5], dtype=torch.int8), "min=-3 max=5 mean=1"),
        (torch.tensor([float("nan")] * 2), "nan=2 inf=0, nothing finite"),
        (torch.empty(0, 8), "no statistics: empty"),
        (torch.empty(4, device="meta"), "no statistics: meta tensor"),
        (torch.zeros(2, dtype=torch.complex64), "no statistics: complex"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "no statistics: "),
        (torch.full((1000,), 60000.0, dtype=torch.float16), "mean=60000"),
    ],
    ids=str,
)
def test_statistics_of_every_kind_of_tensor(log, tensor, text):
    log.decorate(5, lambda x: None)(tensor)
    assert text in log.text()


def test_statistics_are_left_out_during_graph_capture(log, monkeypatch):
    monkeypatch.setattr(api_log_text, "is_capturing", lambda: True)
    log.decorate(5, add)(torch.ones(2))
    assert log.text().count("no statistics: CUDA graph capture") == 2
    assert "min=" not in log.text()


def test_what_works_in_place_shows_its_arguments_after_the_call(log):
    log.decorate(5, lambda x, scale: x.mul_(scale) and None)(torch.tensor(2.0), 3.0)
    before, after = log.text().split("returned None")
    assert "min=2 max=2" in before and re.search("  x is now Tensor.* min=6 max=6", after)


def test_excluded_calls_skip_the_statistics(log, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DUMP_EXCLUDE", "other, a*d")
    log.decorate(5, add)(torch.ones(2))
    assert "no statistics: FLASHINFER_DUMP_EXCLUDE" in log.text() and "min=" not in log.text()


def test_nested_values_and_long_ones(log):
    def func(pair, table, words, number, thing):
        return {"a": [pair[0]]}

    log.decorate(3, func)(
        (torch.ones(1), torch.zeros(2)), {"k": torch.ones(3)}, ["w"] * 500, float("nan"), object()
    )
    text = log.text()
    assert "  pair = tuple of 2\n    [0]: Tensor(shape=(1,)" in text
    assert "  table = dict of 1\n    'k': Tensor(shape=(3,)" in text
    assert "characters)" in text and "number = nan" in text
    assert "thing = <builtins.object at 0x" in text
    assert "returned dict of 1\n    'a': list of 1\n        [0]: Tensor(shape=(1,)" in text


def test_repr_of_arguments_is_never_called(log):
    class Fragile:
        def __repr__(self):
            raise AssertionError("a repr may read device memory")

    log.decorate(5, lambda thing: None)(Fragile())
    assert "Fragile at 0x" in log.text()


def test_exceptions_are_logged_and_pass_through(log):
    def func(x):
        raise ValueError("x must be even, got 3")

    with pytest.raises(ValueError, match="got 3"):
        log.decorate(1, func)(3)
    assert "func raised ValueError: x must be even, got 3" in log.text()


def test_wrong_calls_still_raise_type_error(log):
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        log.decorate(3, add)(1, wrong=2)
    with pytest.raises(TypeError, match="positional argument"):
        log.decorate(3, add)(1, 2, 3, 4)
    assert "wrong = 2" in log.text() and "args[" in log.text()


def test_methods_carry_the_class_of_the_object(log):
    class Base:
        def run(self, q):
            return q

    class Wrapper(Base):
        pass

    Base.run = log.decorate(3, Base.run)
    assert Wrapper().run(5) == 5
    assert "Wrapper.run called\n  self = <" in log.text() and "  q = 5\n" in log.text()


def test_wrapper_keeps_identity(log):
    logged = log.decorate(3, add)
    assert logged.__name__ == "add" and logged.__doc__ == "Add." and logged.__wrapped__ is add


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams(log, monkeypatch, capsys, stream):
    monkeypatch.setenv("FLASHINFER_LOGDEST", stream)
    log.decorate(1, add)(torch.ones(1))
    assert "add" in getattr(capsys.readouterr(), {"stdout": "out", "stderr": "err"}[stream])


def test_process_id_in_path_and_missing_folder(log, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "deep" / "log_%i.txt"))
    log.decorate(1, add)(torch.ones(1))
    assert "add" in (tmp_path / "deep" / f"log_{os.getpid()}.txt").read_text()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("state", ["closed", "none", "broken pipe"])
def test_a_daemon_without_streams_is_not_stopped(log, monkeypatch, stream, state):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    logged = log.decorate(1, add)
    broken: io.StringIO | None = Broken() if state == "broken pipe" else io.StringIO()
    if state == "closed":
        broken.close()
    monkeypatch.setattr(sys, stream, None if state == "none" else broken)
    monkeypatch.setenv("FLASHINFER_LOGDEST", stream)
    assert logged(1) == 2.0


def test_unwritable_destination_warns_and_does_not_stop_the_call(
    log, monkeypatch, capsys, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "file" / "log.txt"))
    logged = log.decorate(1, add)
    assert logged(2) == 3 and logged(3) == 4
    error = capsys.readouterr().err
    assert error.count("cannot write API log") == 1 and error.count("add") == 2


def test_records_of_threads_do_not_mix(log):
    logged = log.decorate(3, add)

    def work():
        for _ in range(20):
            logged(torch.ones(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = log.text().splitlines()
    starts = [line for line in lines if line.startswith("[flashinfer ")]
    numbers = [re.search(r"#(\d+) ", line).group(1) for line in starts if line.endswith("called")]
    assert len(numbers) == len(set(numbers)) == 80
    assert len(lines) == 80 * 5


def test_crash_leaves_the_inputs_in_the_file(tmp_path):
    path = tmp_path / "crash.log"
    code = """
        import os, torch
        from flashinfer.api_logging import flashinfer_api

        @flashinfer_api
        def kernel(x, scale):
            os.abort()

        kernel(torch.full((3, 5), 2.0), 0.25)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "FLASHINFER_LOGLEVEL": "5", "FLASHINFER_LOGDEST": str(path)},
        capture_output=True,
    )
    assert child.returncode < 0
    text = path.read_text()
    assert "kernel called" in text and "shape=(3, 5)" in text and "scale = 0.25" in text
    assert "mean=2" in text and "returned" not in text


def test_no_logging_under_torch_compile(log):
    logged = log.decorate(5, lambda x: x + 1)
    compiled = torch.compile(lambda x: logged(x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert log.text() == ""


@pytest.mark.parametrize("bad", [int, staticmethod(add), classmethod(add), 5])
def test_only_functions_can_be_decorated(bad):
    with pytest.raises(TypeError, match="@flashinfer_api goes on a function"):
        flashinfer_api(bad)


def test_registry_and_trace_attributes(log, registry):
    template, other = SimpleNamespace(name_prefix="one"), SimpleNamespace(name_prefix="other")

    def dispatch(**kwargs):
        return template

    dispatch.templates = [template, other]

    def f(x):
        return x

    def g(x):
        return x

    assert log.decorate(0, f, trace=template).__flashinfer_trace__ is template
    logged = log.decorate(3, g, trace=dispatch)
    assert logged.__flashinfer_trace__ is dispatch and callable(logged.fi_trace)
    log.decorate(0, add)
    f_name, g_name = f.__qualname__, g.__qualname__
    labels = (f_name, f"{g_name}[one]", f"{g_name}[other]")
    functions, templates = (f, g, g), (template, template, other)
    assert registry == list(zip(functions, templates, labels, strict=True))
    assert decorator.traced_functions == [(f, template), (g, dispatch)]
    assert not hasattr(add, "fi_trace")


def test_trace_dump_hook_sees_the_call_before_it_runs(registry, monkeypatch):
    order = []
    monkeypatch.setattr(decorator, "dump_definition", lambda *seen: order.append(seen))
    template = object()

    def func(x, y=2):
        order.append("ran")
        return x + y

    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "0")
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP", "1")
    traced = flashinfer_api(trace=template)(func)
    assert traced(1, y=4) == 5
    assert order == [(func, template, (1,), {"y": 4}), "ran"]
    assert flashinfer_api(add) is add  # without a trace there is nothing to dump


def test_fi_trace_attribute_passes_the_function_on(registry, monkeypatch):
    monkeypatch.setattr(decorator, "fi_trace", lambda api, **kwargs: (api, kwargs))
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "0")

    def func(x):
        return x

    api = flashinfer_api(trace=object())(func)
    assert api.fi_trace(x=1) == (api, {"x": 1})
