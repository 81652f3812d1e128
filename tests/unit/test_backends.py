"""``@supported_compute_capability`` and ``@backend_requirement`` without a GPU."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from flashinfer.api_logging import ExperimentalWarning, flashinfer_api
from flashinfer.compat import backends
from flashinfer.compat.backends import (
    BackendSupportedError,
    backend_requirement,
    supported_compute_capability,
)
from flashinfer.utils import experimental_backend


@supported_compute_capability([80, 90])
def _check_scale(input, factor, out=None):
    if input.dim() == 0:
        raise ValueError("input must have at least one dimension")
    return factor != 13


@backend_requirement(backend_checks={}, common_check=_check_scale)
def scale(input, factor, out=None):
    return input * factor


@supported_compute_capability([80, 86, 90])
def _check_alpha(q, k, backend):
    if q.shape[-1] > 256:
        raise ValueError("alpha: head_dim must be at most 256")
    return True


@supported_compute_capability([75, 80, 100])
def _check_beta(q, k, backend):
    return q.shape[-1] != 7


def _rank(suitable_backends, q, k, backend):
    order = ["alpha", "beta"] if q.shape[-1] <= 128 else ["beta", "alpha"]
    return [b for b in order if b in suitable_backends]


CHECKS = {"alpha": _check_alpha, "beta": _check_beta}


@backend_requirement(backend_checks=CHECKS)
def forced(q, k, backend="alpha"):
    return backend


@flashinfer_api
@backend_requirement(backend_checks=CHECKS, heuristic_func=_rank)
def attention(q, k, backend="auto"):
    """Attend."""
    if backend == "auto":
        backend = attention.suitable_auto_backends[0]
    return backend


@pytest.fixture
def on_device(monkeypatch):
    """Pretend that CPU tensors live on a CUDA device of a given capability."""

    def pretend(capability):
        device = torch.device("cuda", 0)
        monkeypatch.setattr(backends, "_cuda_device", lambda values: device)
        monkeypatch.setattr(backends, "get_compute_capability", lambda device: capability)
        monkeypatch.setattr(backends, "get_device_name", lambda device: "NVIDIA Test")

    return pretend


def tensor(*shape):
    return torch.ones(*shape)


def test_single_backend_passes_and_refuses():
    assert torch.equal(scale(tensor(3), 2.0), tensor(3) * 2)
    with pytest.raises(ValueError, match="at least one dimension"):
        scale(torch.tensor(1.0), 2.0)


def test_check_that_returns_false_names_the_api():
    with pytest.raises(BackendSupportedError, match="^Problem size is not supported: scale"):
        scale(tensor(3), 13)


def test_refused_capability_names_device_and_what_is_supported(on_device):
    on_device((7, 5))
    with pytest.raises(BackendSupportedError) as error:
        scale(tensor(3), 2.0)
    assert str(error.value) == (
        "scale does not support compute capability 75 of cuda:0 (NVIDIA Test); it supports 80, 90"
    )
    with pytest.raises(
        BackendSupportedError, match="forced: backend 'alpha' does not support .* 75"
    ):
        forced(tensor(3), None)
    assert forced(tensor(3), None, backend="beta") == "beta"


def test_listed_capability_passes(on_device):
    on_device((9, 0))
    assert torch.equal(scale(tensor(3), 2.0), tensor(3) * 2)


@pytest.mark.parametrize("backend", ["gamma", "auto", None, ["alpha"]])
def test_unknown_backend_lists_the_known(backend):
    with pytest.raises(BackendSupportedError) as error:
        forced(tensor(3), None, backend=backend)
    assert str(error.value) == (
        f"forced does not support backend {backend!r}: `backend` must be one of 'alpha', 'beta'"
    )


def test_unknown_backend_of_an_api_with_auto():
    with pytest.raises(BackendSupportedError, match="backend 'gamma': .*'alpha', 'beta', 'auto'"):
        attention(tensor(3), None, backend="gamma")


def test_check_sees_defaults_and_keywords():
    seen = []

    def check(*, out, factor=0, input):  # another order, keyword-only
        seen.append((input, factor, out))
        return True

    @backend_requirement({}, common_check=check)
    def api(input, factor, out="unset"):
        return input

    api(1, 2)
    api(1, factor=3)
    api(out=5, input=1, factor=4)
    assert seen == [(1, 2, "unset"), (1, 3, "unset"), (1, 4, 5)]


def test_check_may_take_fewer_parameters_or_any():
    seen = []

    def few(factor):
        seen.append(factor)
        return True

    def all_of_them(**arguments):
        seen.append(arguments)
        return True

    @backend_requirement({"few": few}, common_check=all_of_them)
    def api(input, factor, *, backend="few"):
        return input

    assert api(1, 2) == 1
    assert seen == [{"input": 1, "factor": 2, "backend": "few"}, 2]


def test_every_kind_of_parameter():
    @backend_requirement({}, common_check=lambda a, c: a < c)
    def api(a, /, b, *, c=2):
        return a, b, c

    assert api(1, 5) == (1, 5, 2)
    assert api(1, b=5, c=9) == (1, 5, 9)
    with pytest.raises(BackendSupportedError):
        api(3, 5)
    with pytest.raises(TypeError):
        api(1, 5, 9)
    assert backend_requirement({})(lambda: 7)() == 7


def test_methods():
    class Wrapper:
        @backend_requirement({}, common_check=_check_common_80)
        def run(self, q, *, backend="only"):
            return q + 1

    assert Wrapper().run(1) == 2 and Wrapper().run(1, skip_check=True) == 2


def test_defaults_are_the_very_objects():
    default = object()

    @backend_requirement({}, common_check=lambda x: x is default)
    def api(x=default):
        return x

    assert api() is default


@pytest.mark.parametrize(
    "args, kwargs",
    [((), {}), ((1,), {}), ((1, 2, 3, 4), {}), ((1, 2), {"factor": 3}), ((1, 2), {"wrong": 3})],
)
def test_wrong_calls_raise_the_usual_type_error(args, kwargs):
    with pytest.raises(TypeError, match=r"^scale\(\) "):
        scale(*args, **kwargs)


def test_skip_check_is_consumed(on_device):
    on_device((7, 5))
    assert torch.equal(scale(torch.tensor(2.0), 13, skip_check=True), torch.tensor(26.0))
    assert forced(tensor(3), None, backend="gamma", skip_check=True) == "gamma"
    with pytest.raises(ValueError):
        scale(torch.tensor(2.0), 13, skip_check=False)


@pytest.mark.parametrize(
    "width, first", [(64, "alpha"), (200, "beta"), (300, "beta"), (7, "alpha")]
)
def test_auto_takes_the_best_suitable_backend(width, first):
    assert attention(tensor(1, width), None) == first


def test_auto_leaves_out_backends_for_other_devices(on_device):
    on_device((10, 0))
    assert attention(tensor(1, 64), None) == "beta"
    assert attention.suitable_auto_backends == ["beta"]
    assert attention(tensor(1, 7), None, skip_check=True) == "beta"


def test_auto_without_suitable_backend_gives_every_reason(on_device):
    on_device((8, 6))
    with pytest.raises(BackendSupportedError) as error:
        attention(tensor(1, 300), None)
    lines = str(error.value).splitlines()
    assert lines[0] == "No suitable auto backends found for attention:"
    assert lines[1].strip() == "alpha: head_dim must be at most 256"
    assert "backend 'beta' does not support compute capability 86" in lines[2]


def test_auto_heuristic_must_choose_among_the_suitable():
    @backend_requirement(CHECKS, heuristic_func=lambda found, q: ["gamma"])
    def api(q, k, backend="auto"):
        return backend

    with pytest.raises(BackendSupportedError, match=r"chose \['gamma'\] among"):
        api(tensor(1, 8), None)


def test_suitable_backends_are_of_the_thread_that_asks():
    inside = threading.Barrier(2, timeout=30)

    @backend_requirement(CHECKS, heuristic_func=_rank)
    def api(q, k, backend="auto"):
        inside.wait()  # both calls have entered: a shared list would hold the later one's answer
        return list(api.suitable_auto_backends)

    results = {}

    def call(width):
        results[width] = api(tensor(1, width), None)

    threads = [threading.Thread(target=call, args=(width,)) for width in (64, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {64: ["alpha", "beta"], 300: ["beta"]}


def test_suitable_backends_survive_a_nested_call():
    @backend_requirement(CHECKS, heuristic_func=_rank)
    def api(q, k, backend="auto"):
        inner = api(k, None) if k is not None else None
        return list(api.suitable_auto_backends), inner

    outer, (inner, _) = api(tensor(1, 64), tensor(1, 300))
    assert (outer, inner) == (["alpha", "beta"], ["beta"])


def test_suitable_backends_behave_like_a_list():
    attention(tensor(1, 64), None)
    found = attention.suitable_auto_backends
    assert found == ["alpha", "beta"] and found != ["beta"] and len(found) == 2
    assert "beta" in found and list(found) == ["alpha", "beta"] and found[-1] == "beta"
    assert repr(found) == "['alpha', 'beta']"


def test_added_methods():
    assert attention.has_backend("alpha") and not attention.has_backend("gamma")
    assert attention.has_backend_choices() and not scale.has_backend_choices()
    assert attention.is_backend_supported("alpha")
    assert not attention.is_backend_supported("gamma", 90)
    assert attention.is_backend_supported("alpha", 90)
    assert attention.is_backend_supported("alpha", cc=(9, 0))
    assert not attention.is_backend_supported("beta", cc=90)
    assert attention.is_compute_capability_supported(75)
    assert not attention.is_compute_capability_supported(120)
    assert scale.is_compute_capability_supported(90)
    assert not scale.is_compute_capability_supported(75)
    assert attention.__name__ == "attention" and attention.__doc__ == "Attend."


def test_common_capabilities_limit_every_backend():
    @backend_requirement(CHECKS, common_check=_check_common_80)
    def api(q, k, backend="alpha"):
        return backend

    assert api.is_backend_supported("alpha", 80)
    assert not api.is_backend_supported("alpha", 90)
    assert not api.is_compute_capability_supported(90)


@supported_compute_capability([80])
def _check_common_80(q):
    return True


def test_unmarked_check_supports_every_capability():
    @backend_requirement({}, common_check=lambda x: True)
    def api(x):
        return x

    assert api.is_compute_capability_supported(75)


def test_cuda_device_is_found_in_pairs():
    class FakeTensor(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    on_gpu = tensor(2).as_subclass(FakeTensor)
    assert backends._cuda_device((1.0, None, tensor(2), (tensor(2), on_gpu))) == on_gpu.device
    assert backends._cuda_device((1.0, "x", tensor(2), [tensor(2)])) is None


@pytest.mark.parametrize(
    "ccs, error",
    [
        ([], ValueError),
        ([9], ValueError),
        (["90"], TypeError),
        ([True], TypeError),
        ([9.0], TypeError),
        ([(9,)], TypeError),
    ],
)
def test_bad_capabilities(ccs, error):
    with pytest.raises(error, match="capability"):
        supported_compute_capability(ccs)


def test_decoration_refuses_what_cannot_work():
    def check(missing):
        return True

    with pytest.raises(TypeError, match="takes 'missing', which is not a parameter of the API: x"):
        backend_requirement({}, common_check=check)(lambda x: x)
    with pytest.raises(TypeError, match="no parameter named backend"):
        backend_requirement(CHECKS)(lambda q, k: q)
    with pytest.raises(TypeError, match="skip_check"):
        backend_requirement({})(lambda skip_check: 0)
    with pytest.raises(TypeError, match=r"takes \*args"):
        backend_requirement({})(lambda *args: 0)
    with pytest.raises(TypeError, match="no backend_checks"):
        backend_requirement({}, heuristic_func=_rank)(lambda backend: 0)
    with pytest.raises(TypeError, match=r"not \*args"):
        backend_requirement({}, common_check=lambda *args: True)(lambda x: 0)


def test_an_experimental_backend_is_named_or_left_out(monkeypatch):
    @experimental_backend
    @supported_compute_capability([90])
    def new_check(x, backend):
        return x < 10

    def old_check(x, backend):
        return x < 5

    @backend_requirement(
        {"new": new_check, "old": old_check}, heuristic_func=lambda found, x, backend: found
    )
    def chosen(x, backend="auto"):
        return list(chosen.suitable_auto_backends) if backend == "auto" else backend

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(1) == ["old"] and chosen(1, backend="old") == "old"
    with pytest.raises(BackendSupportedError, match="'new' is experimental: it must be named"):
        chosen(7)
    with pytest.raises(BackendSupportedError, match="'new'"):
        chosen(10, backend="new")
    with pytest.warns(ExperimentalWarning, match="backend 'new' of .*chosen is experimental"):
        assert chosen(7, backend="new") == "new"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(7, backend="new") == "new"  # once in a process
    assert chosen.is_backend_supported("new", 90) and not chosen.is_backend_supported("new", 80)
    monkeypatch.setattr(backends, "experimental_auto_backends_allowed", lambda: True)
    assert chosen(1) == ["new", "old"]
    with pytest.raises(TypeError, match="`checker`"):
        experimental_backend("new")
