"""The benchmark command line: parsing, test lists, repro commands, refusals."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from simulated_benchmark import BENCHMARKS, SMALL, cli, harness, read_csv, routines, small_flags
from simulated_benchmark import timer as timer

import flashinfer
from flashinfer.cli import support

ROUTINES = routines.ROUTINES

# ---- parsing -------------------------------------------------------------------------------------


def test_every_operation_of_the_two_families_has_a_routine():
    names = flashinfer.norm.__all__
    norms = {name for name in names if not name.startswith(("gen_", "supports_"))}
    assert norms == {name for name, r in ROUTINES.items() if r.api.startswith("flashinfer.norm:")}
    assert {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"} <= ROUTINES.keys()


def test_every_kernel_between_the_matrix_products_has_a_routine():
    """All but PyTorch's own: the way back from codes, the order of scales, keys of 8 bits."""
    families = ("norm", "activation", "rope", "page", "cascade", "concat_ops", "quantization")
    operations = [(family, name.split(".")[-1]) for family, name, _ in support.operations()]
    names = {name for family, name in operations if family in families}
    assert set(families) <= {family for family, _ in operations}
    assert {
        n
        for n in names - ROUTINES.keys()
        if not re.search("dequant|interleave|to_float|kv_quant", n)
    } == set()


@pytest.mark.parametrize("name", sorted(ROUTINES))
def test_routines_build_what_their_function_takes(name):
    """Built arguments fit the public signature and the trace template."""
    import inspect

    routine = ROUTINES[name]
    case = cli.parse_case(["--routine", name, *small_flags(routine)])
    arguments = routine.build(case, "cpu")
    function = routines.Backend(routine.api).resolve()
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    harness.template_of(function, arguments).validate(bound.arguments)
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
        (
            ["--routine", "rmsnorm", "--backends", "cudnn"],
            "'cudnn'; it has cuda, cute-dsl, torch",
        ),
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
    assert routines.base.dtype_name("bf16") == routines.base.dtype_name("bfloat16") == "bfloat16"
    assert routines.base.dtype_name("fp8_e4m3") == "float8_e4m3fn"
    with pytest.raises(ValueError, match="bf17"):
        routines.base.dtype_name("bf17")


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


def test_a_reader_that_has_enough_of_the_list_is_no_error():
    command = [sys.executable, str(BENCHMARKS / "flashinfer_benchmark.py"), "--list_routines"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == cli.OK


@pytest.mark.parametrize(
    "name, message",
    [
        ("bench_comm.py", "start it with torchrun"),
        ("bench_compiler_paths.py", "no usable GPU"),
        ("bench_green_contexts.py", "no usable GPU"),
    ],
)
def test_what_a_benchmark_lacks_is_a_line(name, message):
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name)],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == cli.USAGE and message in done.stderr
    assert "Traceback" not in done.stderr


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


def test_backends_of_other_libraries_are_skipped(capsys: pytest.CaptureFixture[str]):
    argv = ["--routine", "rmsnorm", "--backends", "cudnn", "torch", "fa2"]
    assert cli.parse_case(argv).backends == ["torch"]
    skipped = capsys.readouterr().err.splitlines()
    assert [line.split("'")[1] for line in skipped] == ["cudnn", "fa2"]
