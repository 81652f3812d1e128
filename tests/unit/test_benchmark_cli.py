"""The benchmark command line with a simulated timer, on the CPU."""

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer

BENCHMARKS = Path(flashinfer.__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import flashinfer_benchmark as cli  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
from routines import ROUTINES, Backend, Flag, Routine  # noqa: E402
from routines.base import dtype_name, positive  # noqa: E402

SMALL = ["--batch_size", "4", "--hidden_size", "64"]


class FakeTimer:
    """Every call takes one millisecond on a device that copies 2 TB/s; nothing is executed."""

    device = "cpu"

    def __init__(self):
        self.timed = []

    def device_name(self):
        return "simulated"

    def copy_tb_per_sec(self):
        return 2.0

    def time(self, function, arguments, case):
        self.timed.append((function, arguments, case))
        return [1.0, 1.5, 0.5], "simulated"


@pytest.fixture
def timer():
    return FakeTimer()


@pytest.fixture
def add_routine(monkeypatch):
    """Registers routines of the test's own, removed afterwards."""

    def add(function, name="toy", **declared):
        routine = Routine(
            name=name,
            api=declared.pop("api", "flashinfer.norm:rmsnorm"),
            flags=[
                Flag("batch_size", positive, 8, "rows"),
                Flag("toy_switch", bool, False, "switch"),
            ],
            build=lambda case, device: {"input": torch.ones(case.batch_size, 1000, device=device)},
            reads=["input"],
            writes=["input"],
            backends={"cuda": Backend(function)},
            **declared,
        )
        monkeypatch.setitem(ROUTINES, name, routine)
        return routine

    return add


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ---- parsing -------------------------------------------------------------------------------------


def test_every_operation_of_the_two_families_has_a_routine():
    norms = {
        name for name in flashinfer.norm.__all__ if not name.startswith("g") or "gemma" in name
    }
    assert norms == {name for name, r in ROUTINES.items() if r.api.startswith("flashinfer.norm:")}
    assert {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"} <= ROUTINES.keys()


@pytest.mark.parametrize("name", sorted(ROUTINES))
def test_routines_build_what_their_function_takes(name):
    """Built arguments fit the public signature and the trace template."""
    import inspect

    routine = ROUTINES[name]
    case = cli.parse_case(["--routine", name, *SMALL])
    arguments = routine.build(case, "cpu")
    function = Backend(routine.api).resolve()
    inspect.signature(function).bind(**arguments)
    harness.template_of(function, arguments).validate(
        inspect.signature(function).bind(**arguments).arguments
        | {"eps": getattr(case, "eps", None)}
    )
    assert routine.nbytes(arguments) > 0


def test_bytes_count_each_operand_once():
    rows, width = 4, 64
    tensor = rows * width * 2
    weight = width * 2

    def nbytes(name, *flags):
        case = cli.parse_case(["--routine", name, *SMALL, *flags])
        return ROUTINES[name].nbytes(ROUTINES[name].build(case, "cpu"))

    assert nbytes("rmsnorm") == 2 * tensor + weight
    assert nbytes("rmsnorm", "--input_dtype", "fp32") == 2 * (2 * tensor + weight)
    assert nbytes("rmsnorm", "--num_heads", "8") == 8 * 2 * tensor + weight
    assert nbytes("fused_add_rmsnorm") == 4 * tensor + weight
    assert nbytes("rmsnorm_quant") == tensor + tensor // 2 + weight + 4
    assert nbytes("fused_add_rmsnorm_quant") == 3 * tensor + tensor // 2 + weight + 4
    assert nbytes("layernorm") == 2 * tensor + 4 * weight
    assert nbytes("silu_and_mul") == 3 * tensor


def test_shape_flags_reach_the_tensors():
    case = cli.parse_case(
        ["--routine", "rmsnorm", "--batch_size", "3", "--num_heads", "5", "--hidden_size", "16"]
        + ["--input_dtype", "fp16", "--eps", "0.5", "--enable_pdl"]
    )
    arguments = ROUTINES["rmsnorm"].build(case, "cpu")
    assert arguments["input"].shape == arguments["out"].shape == (3, 5, 16)
    assert arguments["input"].dtype == torch.float16
    assert (arguments["eps"], arguments["enable_pdl"]) == (0.5, True)
    case = cli.parse_case(["--routine", "rmsnorm_quant", *SMALL, "--out_dtype", "fp8_e5m2"])
    assert ROUTINES["rmsnorm_quant"].build(case, "cpu")["out"].dtype == torch.float8_e5m2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--routine or --testlist"),
        (["--routine", "rmsnrom"], "unknown routine 'rmsnrom'; routines are"),
        (["--routine", "rmsnorm", "--pages", "3"], r"--pages.*flags of rmsnorm: --batch_size"),
        (["--routine", "silu_and_mul", "--eps", "1"], "--eps"),
        (["--routine", "layernorm", "--num_heads", "2"], "--num_heads"),
        (["--routine", "rmsnorm", "--batch_size", "0"], "0 is not positive"),
        (["--routine", "rmsnorm", "--batch_size", "many"], "batch_size"),
        (["--routine", "rmsnorm", "--num_heads", "-1"], "-1 is negative"),
        (["--routine", "rmsnorm", "--input_dtype", "int8"], "'int8' is no dtype; use one of"),
        (["--routine", "rmsnorm", "--backends", "cudnn"], "no backend 'cudnn'; it has cuda, torch"),
        (["--routine", "rmsnorm", "--use_cupti", "--use_cuda_events"], "not allowed with"),
        (["--routine", "rmsnorm", "--num_iters", "0"], "0 is not positive"),
        (["--routine", "rmsnorm", "--dry_run_iters", "-1"], "-1 is negative"),
        (["--routine", "rmsnorm", "--output_path", "r.txt"], r"must be .csv, .jsonl or .json"),
        (["--routine", "rmsnorm", "--output_path", "/nowhere/r.csv"], "No such file"),
        (["--testlist", "/nowhere/list.txt"], "No such file"),
    ],
)
def test_wrong_command_lines_exit_with_2_and_say_why(capsys, timer, argv, message):
    import re

    assert cli.main(argv, timer) == cli.USAGE
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert timer.timed == []


def test_dtype_names():
    assert dtype_name("bf16") == dtype_name("bfloat16") == "bfloat16"
    assert dtype_name("fp8_e4m3") == "float8_e4m3fn"
    with pytest.raises(ValueError, match="bf17"):
        dtype_name("bf17")


def test_list_routines_needs_no_gpu(capsys):
    assert cli.main(["--list_routines"]) == cli.OK
    out = capsys.readouterr().out
    for name, routine in ROUTINES.items():
        assert name in out
        assert all(f"--{flag.name}" in out for flag in routine.flags)


def test_without_a_gpu_it_exits_with_3_and_writes_nothing(tmp_path):
    path = tmp_path / "r.csv"
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: False\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r}); import flashinfer_benchmark as cli\n"
        f"sys.exit(cli.main(['--routine', 'rmsnorm', '--output_path', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS.parent
    )
    assert done.returncode == cli.NO_GPU, done.stderr
    assert "no usable GPU" in done.stderr
    assert not path.exists()


# ---- running -------------------------------------------------------------------------------------


def test_a_row_has_time_bandwidth_and_percent(capsys, timer):
    assert cli.main(["--routine", "silu_and_mul", *SMALL], timer) == cli.OK
    nbytes = 3 * 4 * 64 * 2
    out = capsys.readouterr().out
    assert "1000.000 us" in out and "silu_and_mul" in out and "batch_size=4" in out
    assert f"{100 * nbytes / 1e-3 / 2e12:5.1f} % of copy" in out


def test_all_backends_are_timed_with_their_own_arguments(timer, tmp_path):
    path = tmp_path / "r.jsonl"
    argv = [
        "--routine",
        "rmsnorm",
        "--backends",
        "cuda",
        "torch",
        *SMALL,
        "--output_path",
        str(path),
    ]
    assert cli.main(argv, timer) == cli.OK
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [row["backend"] for row in rows] == ["cuda", "torch"]
    (ours, with_out, _), (peer, without_out, _) = timer.timed
    assert ours is flashinfer.norm.rmsnorm and "out" in with_out
    assert peer is not ours and "out" not in without_out


def test_csv_has_one_column_per_flag_and_grows(timer, tmp_path):
    path = tmp_path / "r.csv"
    common = ["--output_path", str(path), "--case_tag", "first, with a comma", *SMALL]
    assert cli.main(["--routine", "rmsnorm", *common, "--enable_pdl"], timer) == cli.OK
    assert cli.main(["--routine", "silu_and_mul", *common], timer) == cli.OK
    rows = read_csv(path)
    assert [row["routine"] for row in rows] == ["rmsnorm", "silu_and_mul"]
    first, second = rows
    assert first["status"] == "ok" and first["case_tag"] == "first, with a comma"
    assert float(first["median_us"]) == 1000.0 and float(first["min_us"]) == 500.0
    assert float(first["tb_per_sec"]) == pytest.approx(int(first["bytes"]) / 1e-3 / 1e12)
    assert float(first["percent_of_copy"]) == pytest.approx(float(first["tb_per_sec"]) / 2.0 * 100)
    assert (first["batch_size"], first["enable_pdl"], first["eps"]) == ("4", "True", "1e-06")
    assert second["eps"] == "" and second["clock"] == "simulated" and second["num_iters"] == "3"
    assert len(path.read_text().splitlines()) == 3


def test_a_csv_of_other_columns_is_not_touched(capsys, timer, tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("a,b\n1,2\n")
    assert (
        cli.main(["--routine", "rmsnorm", *SMALL, "--output_path", str(path)], timer) == cli.USAGE
    )
    assert "other columns" in capsys.readouterr().err
    assert path.read_text() == "a,b\n1,2\n"


def test_json_lines_leave_out_what_does_not_apply(timer, tmp_path):
    path = tmp_path / "r.jsonl"
    assert (
        cli.main(["--routine", "silu_and_mul", *SMALL, "--output_path", str(path)], timer) == cli.OK
    )
    (row,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert row["batch_size"] == 4 and row["median_us"] == 1000.0 and row["cold_l2"] is True
    assert row["device"] == "simulated" and row["torch_version"] == torch.__version__
    assert not {"eps", "tflops_per_sec", "case_tag"} & row.keys()


def test_flops_give_a_rate(add_routine, capsys, timer):
    add_routine(lambda input: None, flops=lambda case: case.batch_size * 10**9)
    assert cli.main(["--routine", "toy", "--batch_size", "250"], timer) == cli.OK
    assert "250.0 TFLOP/s" in capsys.readouterr().out


def test_an_error_in_a_routine_is_reported_and_the_rest_still_runs(add_routine, capsys, tmp_path):
    class CallingTimer(FakeTimer):
        def time(self, function, arguments, case):
            function(**arguments)
            return super().time(function, arguments, case)

    def broken(input):
        raise MemoryError("first line\nout of memory")

    add_routine(broken, "broken")
    add_routine(lambda input: None, "works")
    testlist, path = tmp_path / "list.txt", tmp_path / "r.csv"
    testlist.write_text("--routine broken\n--routine works\n")
    argv = ["--testlist", str(testlist), "--output_path", str(path)]
    assert cli.main(argv, CallingTimer()) == cli.FAILED
    rows = read_csv(path)
    assert [row["status"] for row in rows] == ["error: MemoryError: out of memory", "ok"]
    assert rows[0]["median_us"] == ""
    captured = capsys.readouterr()
    assert "error: MemoryError" in captured.out
    assert "Traceback" in captured.err and "1 failed" in captured.err


@pytest.mark.parametrize(
    "routine", ["rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
)
def test_refcheck_passes_for_the_pytorch_backend(timer, routine):
    argv = ["--routine", routine, "--backends", "torch", "--refcheck"]
    assert cli.main([*argv, "--batch_size", "32", "--hidden_size", "256"], timer) == cli.OK
    assert len(timer.timed) == 1


def test_refcheck_of_every_routine_through_the_reference_backend(timer):
    with flashinfer.reference_backend():
        for name in ROUTINES:
            assert cli.main(["--routine", name, "--refcheck", *SMALL], timer) == cli.OK, name


def test_a_failed_refcheck_exits_with_1_and_gives_no_time(monkeypatch, capsys, timer, tmp_path):
    def wrong(input, weight, eps):
        out = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        out[1, 7] += 1
        return out

    routine = ROUTINES["rmsnorm"]
    wrong_backend = Backend(wrong, omits=("out", "enable_pdl"))
    monkeypatch.setitem(routine.backends, "wrong", wrong_backend)
    path = tmp_path / "r.jsonl"
    argv = ["--routine", "rmsnorm", "--backends", "wrong", *SMALL, "--output_path", str(path)]
    assert cli.main([*argv, "--refcheck"], timer) == cli.FAILED
    captured = capsys.readouterr()
    assert "refcheck failed" in captured.out
    assert "worst element [1, 7]" in captured.err
    (row,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert row["status"] == "refcheck failed" and "median_us" not in row
    assert timer.timed == []
    assert cli.main(argv, timer) == cli.OK, "without --refcheck it is only timed"


def test_the_same_seed_draws_the_same_inputs(timer):
    for seed in ("3", "3", "4"):
        cli.main(["--routine", "rmsnorm", *SMALL, "--random_seed", seed], timer)
    first, same, other = (arguments["input"] for _, arguments, _ in timer.timed)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_verbosity(capsys, timer):
    lines = []
    for flags in ([], ["-v"], ["-vv"]):
        cli.main(["--routine", "rmsnorm", *SMALL, *flags], timer)
        lines.append(capsys.readouterr().out.count("\n"))
    assert lines == [1, 2, 3]


# ---- test lists and repro commands ---------------------------------------------------------------


def test_testlist_lines_follow_the_flags_of_the_command_line(timer, tmp_path):
    testlist, path = tmp_path / "list.txt", tmp_path / "r.csv"
    testlist.write_text(
        "# comment\n\n"
        "--routine rmsnorm --batch_size 2  # two rows\n"
        "--routine rmsnorm --case_tag 'own tag' --num_iters 9\n"
    )
    argv = ["--testlist", str(testlist), "--batch_size", "7", "--hidden_size", "32"]
    argv += ["--case_tag", "common", "--output_path", str(path)]
    assert cli.main(argv, timer) == cli.OK
    rows = read_csv(path)
    assert [row["batch_size"] for row in rows] == ["2", "7"]
    assert [row["case_tag"] for row in rows] == ["common", "own tag"]
    assert [case.num_iters for _, _, case in timer.timed] == [None, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no case in it"),
        ("# only a comment\n", "no case in it"),
        ("--routine rmsnorm\n--routine wrong\n", "line 2: unknown routine 'wrong'"),
        ("--batch_size 3\n", "line 1: --routine is missing"),
        ("--routine rmsnorm --output_path x.csv\n", "line 1: --output_path belongs"),
        ("--testlist other.txt\n", "line 1: --testlist belongs"),
        ("--routine rmsnorm --case_tag 'open\n", "line 1: No closing quotation"),
    ],
)
def test_wrong_testlists_are_refused_before_anything_runs(capsys, timer, tmp_path, text, message):
    testlist = tmp_path / "list.txt"
    testlist.write_text(text)
    assert cli.main(["--testlist", str(testlist)], timer) == cli.USAGE
    assert message in capsys.readouterr().err
    assert timer.timed == []


@pytest.mark.parametrize(
    "sample", sorted((BENCHMARKS / "samples").glob("*.txt")), ids=lambda p: p.stem
)
def test_sample_testlists_parse(sample):
    cases = cli.read_testlist(str(sample), [])
    assert len(cases) >= 5
    assert all(case.routine in ROUTINES for case in cases)


def test_samples_cover_every_routine():
    samples = (BENCHMARKS / "samples").glob("*.txt")
    covered = {case.routine for sample in samples for case in cli.read_testlist(str(sample), [])}
    assert covered == set(ROUTINES)


@pytest.mark.parametrize(
    "argv",
    [
        ["--routine", "rmsnorm"],
        ["--routine", "rmsnorm", "--num_heads", "8", "--enable_pdl", "--eps", "1e-5"],
        ["--routine", "rmsnorm", "--backends", "torch", "--refcheck"],
        ["--routine", "silu_and_mul", "--backends", "torch", "--input_dtype", "fp16", "--warm_l2"],
        ["--routine", "rmsnorm_quant", "--out_dtype", "fp8_e5m2", "--scale", "0.125"],
        ["--routine", "layernorm", "--use_cuda_events", "--no_cuda_graph", "--num_iters", "7"],
        ["--routine", "layernorm", "--dry_run_iters", "0", "--case_tag", "it's a tag; rm x"],
        ["--routine", "layernorm", "--use_cupti", "--random_seed", "9"],
    ],
)
def test_repro_command_repeats_the_case(capsys, timer, argv):
    assert cli.main([*argv, *SMALL, "--generate_repro_command"], timer) == cli.OK
    command = capsys.readouterr().out.splitlines()[1].strip()
    python, script, *again = shlex.split(command)
    assert (python, script) == ("python", "benchmarks/flashinfer_benchmark.py")
    before = vars(cli.parse_case([*argv, *SMALL]))
    assert vars(cli.parse_case(again)) == before


def test_repro_command_is_in_the_files(timer, tmp_path):
    path = tmp_path / "r.csv"
    argv = ["--routine", "rmsnorm", "--backends", "cuda", "torch", *SMALL]
    cli.main([*argv, "--output_path", str(path)], timer)
    commands = [shlex.split(row["repro_command"]) for row in read_csv(path)]
    assert [c[c.index("--backends") + 1] for c in commands] == ["cuda", "torch"]


# ---- what the GPU timer asks for -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "cupti", "graph", "cold"),
    [
        ([], True, True, True),
        (["--use_cupti", "--no_cuda_graph"], True, False, True),
        (["--use_cuda_events"], False, True, True),
        (["--use_cuda_events", "--no_cuda_graph", "--warm_l2"], False, False, False),
    ],
)
def test_clock_flags_reach_the_timer(monkeypatch, flags, cupti, graph, cold):
    seen = {}

    def fake(request, **how):
        seen.update(how, request=request)
        return [1.0], "clock"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "time_and_clock", fake)
    argv = ["--routine", "rmsnorm", *flags, "--num_iters", "6", "--dry_run_iters", "2"]
    timed = harness.GpuTimer().time(print, {"sep": "-"}, cli.parse_case(argv))
    assert timed == ([1.0], "clock")
    request = seen.pop("request")
    assert seen == {"cupti": cupti, "graph": graph}
    assert (request.repeat_iters, request.dry_run_iters, request.cold_l2) == (6, 2, cold)
    assert request.kwargs == {"sep": "-"}


def test_report_line_without_a_time():
    row = dict(routine="r", backend="b", median_us=None, status="refcheck failed")
    assert report.line(row, "batch_size=1").endswith("batch_size=1  refcheck failed")
    assert report.details(row, True) == []
