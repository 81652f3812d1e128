"""What the benchmark runs, prints and writes, with a simulated timer on the CPU."""

import json

import pytest
import torch
from simulated_benchmark import SMALL, FakeTimer, cli, read_csv, report, routines, small_flags
from simulated_benchmark import timer as timer

import flashinfer

ROUTINES = routines.ROUTINES


@pytest.fixture
def add_routine(monkeypatch):
    """Registers routines of the test's own, removed afterwards."""

    def add(function, name="toy", **declared):
        routine = routines.Routine(
            name=name,
            api=declared.pop("api", "flashinfer.norm:rmsnorm"),
            flags=[
                routines.Flag("batch_size", routines.base.positive, 8, "rows"),
                routines.Flag("toy_switch", bool, False, "switch"),
            ],
            build=lambda case, device: {"input": torch.ones(case.batch_size, 1000, device=device)},
            reads=["input"],
            writes=["input"],
            backends={"cuda": routines.Backend(function)},
            **declared,
        )
        monkeypatch.setitem(ROUTINES, name, routine)
        return routine

    return add


def test_a_routine_without_backends_times_its_function():
    made = routines.Routine("toy", "flashinfer.norm:rmsnorm", [], lambda *_: {}, [], [])
    assert made.backends == {"cuda": routines.Backend("flashinfer.norm:rmsnorm")}


def test_a_row_has_time_bandwidth_and_percent(capsys, timer):
    argv = ["--routine", "silu_and_mul", "--batch_size", "1000", "--hidden_size", "5000"]
    assert cli.main(argv, timer) == cli.OK
    out = capsys.readouterr().out
    # 30 MB in a millisecond, on a device that copies 2 TB/s.
    assert "1000.000 us   0.030 TB/s    1.5 % of copy" in out
    assert "silu_and_mul" in out and "batch_size=1000 hidden_size=5000" in out


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
        for name, routine in ROUTINES.items():
            argv = ["--routine", name, "--refcheck", *small_flags(routine)]
            assert cli.main(argv, timer) == cli.OK, name


def test_a_failed_refcheck_exits_with_1_and_gives_no_time(monkeypatch, capsys, timer, tmp_path):
    def wrong(input, weight, eps):
        out = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        out[1, 7] += 1
        return out

    routine = ROUTINES["rmsnorm"]
    wrong_backend = routines.Backend(wrong, omits=("out", "enable_pdl"))
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


def test_what_a_graph_cannot_hold_is_timed_without(timer):
    assert cli.main(["--routine", "packbits", "--num_elements", "64"], timer) == cli.OK
    flags = ["--num_elements", "64", "--segment_length", "9"]
    assert cli.main(["--routine", "segment_packbits", *flags], timer) == cli.OK
    assert [case.no_cuda_graph for _, _, case in timer.timed] == [False, True]


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


def test_report_line_without_a_time():
    row = dict(routine="r", backend="b", median_us=None, status="refcheck failed")
    assert report.line(row, "batch_size=1").endswith("batch_size=1  refcheck failed")
    assert report.details(row, True) == []
