"""The attention routines of the benchmark: lengths, bytes and operations, and a peer's check."""

import pytest
import torch
from simulated_benchmark import cli, read_csv, routines
from simulated_benchmark import timer as timer

import flashinfer
from flashinfer._attention.plan import choice as backends
from flashinfer.testing import attention_flops

ROUTINES = routines.ROUTINES
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
SMALL = ["--num_qo_heads", "6", "--num_kv_heads", "2", "--head_dim_qk", "32", "--head_dim_vo", "32"]


def parse(name, *flags):
    return cli.parse_case(["--routine", name, *SMALL, *flags])


def build(name, *flags):
    return ROUTINES[name].build(parse(name, *flags), "cpu")


def lengths(name, *flags):
    import routines.attention

    return routines.attention.lengths(parse(name, *flags))


def test_lengths_are_those_of_the_flags():
    flags = ("--batch_size", "3", "--s_kv", "50")
    qo, kv = lengths(PAGED, *flags, "--s_qo", "7")
    assert qo.tolist() == [7, 7, 7] and kv.tolist() == [50, 50, 50]
    qo, kv = lengths(DECODE, *flags)
    assert qo.tolist() == [1, 1, 1] and kv.tolist() == [50, 50, 50]


def test_random_lengths_stay_below_the_flags_and_repeat():
    flags = ("--batch_size", "500", "--s_qo", "20", "--s_kv", "30", "--random_actual_seq_len")
    qo, kv = lengths(PAGED, *flags)
    assert (qo.min(), qo.max(), kv.max()) == (1, 20, 30)
    assert (kv >= qo).all() and kv.unique().numel() > 20
    again, other = lengths(PAGED, *flags), lengths(PAGED, *flags, "--random_seed", "7")
    assert torch.equal(qo, again[0]) and torch.equal(kv, again[1])
    assert not torch.equal(kv, other[1])
    qo, kv = lengths(PAGED, *flags[:2], "--s_qo", "20", "--s_kv", "5", "--random_actual_seq_len")
    assert (qo.max(), kv.min(), kv.max()) == (20, 1, 5)


def test_one_request_may_be_longer():
    flags = ("--batch_size", "5", "--s_kv", "30", "--longer_request", "64")
    qo, kv = lengths(DECODE, *flags)
    assert sorted(kv.tolist()) == [30, 30, 30, 30, 1920] and qo.tolist() == [1] * 5
    tokens = 2040 * 2 * 2 * 32 * 2
    assert ROUTINES[DECODE].nbytes(build(DECODE, *flags)) == 2 * 5 * 6 * 32 * 2 + tokens
    even, longer = (
        lengths(PAGED, *flags[:4], *f, "--random_actual_seq_len")[1] for f in ((), flags[4:])
    )
    assert (longer // even).tolist() == [1, 1, 64, 1, 1]


def test_requests_that_decode_come_before_the_others():
    flags = ("--batch_size", "2", "--s_qo", "7", "--s_kv", "30")
    qo, kv = lengths("BatchAttention", *flags, "--decode_requests", "3", "--decode_s_kv", "90")
    assert qo.tolist() == [1, 1, 1, 7, 7] and kv.tolist() == [90, 90, 90, 30, 30]
    assert lengths("BatchAttention", *flags)[0].tolist() == [7, 7]


@pytest.mark.parametrize("name", [PAGED, RAGGED, "single_prefill_with_kv_cache"])
def test_results_of_8_bit_queries_are_bfloat16(name, timer):
    flags = ("--s_qo", "9", "--s_kv", "40", "--q_dtype", "fp8_e4m3", "--kv_dtype", "fp8_e4m3")
    flags += ("--head_dim_qk", "64", "--head_dim_vo", "64")
    arguments = build(name, *flags)
    assert arguments["q"].dtype == torch.float8_e4m3fn
    requests = 1 if name.startswith("single") else 16
    rows, tokens = requests * 9 * 6 * 64, requests * 40 * 2 * 64
    assert ROUTINES[name].nbytes(arguments) == rows * (1 + 2) + 2 * tokens
    with flashinfer.reference_backend():
        argv = ["--routine", name, *SMALL, *flags, "--refcheck", "--backends", "fa3"]
        assert cli.main(argv, timer) == cli.OK


def test_the_plan_has_the_lengths():
    flags = ("--batch_size", "9", "--s_qo", "5", "--s_kv", "99", "--random_actual_seq_len")
    qo, kv = lengths(PAGED, *flags)
    for name in (PAGED, RAGGED):
        problem = build(name, *flags)["self"]._problem
        assert torch.equal(problem.requests.qo_lengths(), qo) and torch.equal(
            problem.requests.kv_lengths(), kv
        )


@pytest.mark.parametrize("hnd", [(), ("--hnd",)])
def test_pages_are_in_random_places(hnd):
    arguments = build(DECODE, "--batch_size", "4", "--s_kv", "33", "--page_size", "8", *hnd)
    pages = arguments["self"]._problem.tensors.kv_indices
    assert sorted(pages.tolist()) == list(range(20)) and pages.tolist() != sorted(pages.tolist())
    inner = (2, 8) if hnd else (8, 2)
    assert [part.shape for part in arguments["paged_kv_cache"]] == [(20, *inner, 32)] * 2


def test_bytes_are_those_of_cached_tokens():
    flags = ("--batch_size", "4", "--s_kv", "33", "--page_size", "8")
    rows = 4 * 6 * 32 * 2  # of queries or results
    tokens = 4 * 33 * 2 * 32 * 2  # of keys or values: 33, not the 40 of five pages
    assert ROUTINES[DECODE].nbytes(build(DECODE, *flags)) == 2 * rows + 2 * tokens
    eight_bit = build(DECODE, *flags, "--kv_dtype", "fp8_e4m3")
    assert ROUTINES[DECODE].nbytes(eight_bit) == 2 * rows + tokens
    ragged = build(RAGGED, "--batch_size", "4", "--s_qo", "3", "--s_kv", "33")
    assert ROUTINES[RAGGED].nbytes(ragged) == 2 * 3 * rows + 2 * tokens
    single = build("single_prefill_with_kv_cache", "--s_qo", "4", "--s_kv", "132")
    assert ROUTINES["single_prefill_with_kv_cache"].nbytes(single) == 2 * rows + 2 * tokens


def test_operations_of_visible_pairs():
    flags = ("--batch_size", "3", "--s_qo", "10", "--s_kv", "30", "--causal")
    expected = attention_flops(3, 10, 30, 32, 32, 6, True)
    assert ROUTINES[PAGED].flops(parse(PAGED, *flags)) == expected
    assert ROUTINES[RAGGED].flops(parse(RAGGED, *flags[:-1])) > expected
    single = parse("single_prefill_with_kv_cache", "--s_qo", "10", "--s_kv", "30", "--causal")
    assert ROUTINES[single.routine].flops(single) == expected // 3
    assert ROUTINES[DECODE].flops is None, "decode is limited by memory"


@pytest.mark.parametrize("causal", [(), ("--causal",)])
def test_the_peer_computes_what_the_reference_does(timer, causal):
    argv = ["--routine", "single_prefill_with_kv_cache", "--backends", "torch", "--refcheck"]
    assert cli.main([*argv, *SMALL, "--s_qo", "9", "--s_kv", "40", *causal], timer) == cli.OK


def test_decode_with_two_head_sizes_is_an_error(timer, tmp_path):
    path = tmp_path / "r.csv"
    argv = ["--routine", DECODE, "--head_dim_vo", "64", "--output_path", str(path)]
    assert cli.main(argv, timer) == cli.FAILED
    (row,) = read_csv(path)
    assert "--head_dim_vo must be --head_dim_qk" in row["status"]


def test_host_times_of_plans(capsys):
    import bench_host_overhead

    multiples = bench_host_overhead.report_attention("cpu", rounds=1)
    out = capsys.readouterr().out
    assert multiples.pop("torch.add(a, b, out=o)") == 1.0
    assert sorted(name.split(",")[0] for name in multiples) == [
        "BatchAttention plan",
        "decode plan",
        "decode plan",
        "prefill plan",
    ]
    assert all(name in out for name in multiples) and min(multiples.values()) > 0


def test_the_grid_of_prefill_has_both_kernels_of_200_shapes(monkeypatch):
    import bench_prefill_backends as grid

    assert len(set(grid.SHAPES)) == 200
    built = []
    monkeypatch.setattr(grid, "build_jit_specs", built.extend)
    grid.compile_all(grid.SHAPES)
    kernels = {(spec.config.head_dim_qk, spec.config.backend) for spec in built}
    assert kernels == {(dim, name) for dim in (64, 128, 192, 256) for name in ("fa2", "fa3")}
    times = {"fa2": 2.0, "fa3": 1.0, "auto": 1.06}
    row = {**grid.dataclasses.asdict(grid.KINDS[0]), "lengths": [[1, 5, 9], [2, 1, 70]]}
    row |= {"us": times, "tflops": times, "auto": "fa3", "auto_behind": 1.06}
    slow = {**row, "us": {**times, "fa3": 2.0, "fa2": 1.0}, "auto_behind": 2.0}
    text = grid.report([row, {**row, "auto_behind": 1.04}, slow])
    assert text.count("1x5x9 + 2x1x70") == 5  # three shapes, two again as slower ones
    assert "in 2 of 3 shapes (1 by its choice); at worst 2.000" in text
    assert grid.per_request(((1, 5, 9), (2, 1, 70)))[0].tolist() == [5, 1, 1]


def test_drawn_shapes_are_planned_by_both_kernels_and_read_again(tmp_path):
    import bench_prefill_backends as grid

    shapes = grid.random_shapes(60, 1)
    assert shapes == grid.random_shapes(60, 1) != grid.random_shapes(60, 2)
    kinds = [kind for kind, _ in shapes]
    for option in ("mixed", "capped", "alibi", "causal"):
        assert {getattr(kind, option) for kind in kinds} == {False, True}
    assert {kind.head_dim_qk for kind in kinds} == {64, 96, 128, 192, 256}
    us = {"fa2": 2.0, "fa3": 1.0, "auto": 1.0}
    rows = [
        {**grid.dataclasses.asdict(kind), "lengths": lengths, "us": us, "tflops": us, "auto": "fa3"}
        for kind, lengths in shapes
    ]
    with (tmp_path / "drawn.csv").open("w", newline="") as file:
        grid.write(file, rows)
    assert [shape for shape, _ in grid.read(tmp_path / "drawn.csv")] == shapes
    workspace = torch.empty(grid.WORKSPACE_BYTES, dtype=torch.uint8)
    with flashinfer.reference_backend():
        for shape in shapes[:20]:
            for backend in grid.FORCED:
                assert grid.taken(grid.planned(shape, backend, workspace)) == backend


@pytest.mark.compiler
def test_auto_takes_the_better_kernel_of_the_measured_grid(monkeypatch: pytest.MonkeyPatch):
    """Plans as on the H200 that the times are of."""
    import bench_prefill_backends as grid

    monkeypatch.setattr(backends, "is_hopper", lambda device: True)
    workspace = torch.empty(grid.WORKSPACE_BYTES, dtype=torch.uint8)
    behind = {}
    measured = grid.read(grid.MEASURED)
    with flashinfer.reference_backend():
        for shape, us in measured:
            loss = us[grid.taken(grid.planned(shape, "auto", workspace))] / min(us.values())
            if loss > grid.ALLOWED:
                behind[shape] = loss
    assert [shape for shape, _ in measured] == grid.SHAPES
    # Where the predicted times are close: heads of 64, pages of 1, and decode beside short prompts.
    # Numbers of which the grid has fewer lose more elsewhere (docs/tuning/kernel_choice.md).
    close = {
        (grid.KINDS[5], ((1, 128, 2048),)),
        (grid.KINDS[6], ((1, 128, 2048),)),
        (grid.KINDS[6], ((1, 16, 1024),)),
        (grid.MIXED_KINDS[0], ((16, 1, 4096), (4, 512, 512))),
    }
    assert set(behind) <= close
    assert max(behind.values(), default=1.0) < 1.1


# ---- Several sets of keys ----

CASCADE, POD = "MultiLevelCascadeAttentionWrapper", "PODWithPagedKVCacheWrapper"
SPARSE = "BlockSparseAttentionWrapper"
HEAD = 32 * 2  # bytes of a head of one token


def test_a_shared_prefix_counts_once():
    flags = ("--batch_size", "5", "--s_qo", "2", "--s_kv", "33", "--s_prefix", "100")
    tokens, rows = 100 + 5 * 33, 5 * 2
    assert ROUTINES[CASCADE].nbytes(build(CASCADE, *flags)) == (
        2 * tokens * 2 * HEAD + 2 * rows * 6 * HEAD
    )
    expected = 5 * attention_flops(1, 2, 133, 32, 32, 6, False)
    assert ROUTINES[CASCADE].flops(parse(CASCADE, *flags)) == expected
    assert ROUTINES[CASCADE].flops(parse(CASCADE, *flags, "--causal")) < expected


def test_both_parts_of_pod_count():
    flags = ("--batch_size", "5", "--s_qo", "7", "--s_kv", "9", "--decode_s_kv", "33")
    tokens, rows = 9 + 5 * 33, 7 + 5
    assert ROUTINES[POD].nbytes(build(POD, *flags)) == 2 * tokens * 2 * HEAD + 2 * rows * 6 * HEAD
    prompt = attention_flops(1, 7, 9, 32, 32, 6, False)
    expected = prompt + attention_flops(5, 1, 33, 32, 32, 6, False)
    assert ROUTINES[POD].flops(parse(POD, *flags)) == expected


def test_only_visible_blocks_count_as_work(timer):
    flags = ("--s_qo", "12", "--s_kv", "40", "--block_rows", "3", "--block_columns", "8")
    case = parse(SPARSE, *flags, "--blocks_per_row", "2")
    assert ROUTINES[SPARSE].flops(case) == attention_flops(1, 12, 16, 32, 32, 6, False)
    every = parse(SPARSE, *flags, "--blocks_per_row", "99")
    assert ROUTINES[SPARSE].flops(every) == attention_flops(1, 12, 40, 32, 32, 6, False)
    argv = ["--routine", SPARSE, *SMALL, *flags, "--s_kv", "41"]
    assert cli.main(argv, timer) == cli.FAILED and not timer.timed


@pytest.mark.parametrize("name", [CASCADE, POD])
def test_a_wrong_result_gets_no_time(name, timer, capsys, monkeypatch):
    """The bounds of these results are narrow enough to see one key more or less among 40."""
    flags = ["--routine", name, *SMALL, "--batch_size", "3", "--s_qo", "4", "--s_kv", "20"]
    flags += ["--s_prefix", "20"] if name == CASCADE else ["--decode_s_kv", "40"]
    routine = ROUTINES[name]
    run = routine.backends[next(iter(routine.backends))].resolve()

    def without_the_last_key(self, q=None, paged_kv_cache=None, **others):
        cache = paged_kv_cache if name == CASCADE else others["paged_kv_cache_d"]
        last = self._wrappers[1]._problem if name == CASCADE else self._base
        page = last.tensors.kv_indices[last.requests.kv_indptr[1] - 1]
        cache[1][page, last.requests.last_page_len[0] - 1] += 8.0  # of the first request
        given = {"q": q, "paged_kv_cache": paged_kv_cache} if name == CASCADE else {}
        return run(self, **given, **others)

    broken = {"broken": routines.Backend(without_the_last_key)}
    for backends_of, expected in ((routine.backends, cli.OK), (broken, cli.FAILED)):
        changed = routines.base.dataclasses.replace(routine, backends=backends_of)
        monkeypatch.setitem(ROUTINES, name, changed)
        with flashinfer.reference_backend():
            assert cli.main([*flags, "--refcheck"], timer) == expected, capsys.readouterr()
