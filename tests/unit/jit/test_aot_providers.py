"""Prebuilt modules under FlashInfer's names: which there are, and which run on a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashinfer.jit import cache, places
from flashinfer.jit import env as jit_env
from flashinfer.jit.env import cuda_binary_target_compatibility_score as score
from flashinfer.version import __version__


def publish(root: Path, name: str, archs: list[str]) -> Path:
    """Write what counts as a module without its hash: a manifest, and a library of its size."""
    folder = root / name / f"{'0' * 24}-{'_'.join(archs) or 'host'}-{'1' * 8}"
    folder.mkdir(parents=True)
    (folder / f"{name}.so").write_bytes(b"x")
    manifest = {
        "library": f"{name}.so",
        "library_size": 1,
        "library_sha256": "",
        "created": 0,
        "version": __version__,
        "content": "0" * 24,
        "archs": archs,
        "toolchain": "1" * 8,
    }
    (folder / cache.MANIFEST).write_text(json.dumps(manifest))
    assert cache.read_entry(folder), folder
    return folder / f"{name}.so"


def test_scores():
    assert score("sm90a", "sm90a") == (4, 0)
    for better, worse, device in (
        ("sm90a", "sm90", "sm90a"),
        ("sm89", "sm86", "sm89"),
        ("sm86", "sm80", "sm89"),
        ("sm103a", "sm100f", "sm103a"),
        ("sm100f", "sm100", "sm103a"),
    ):
        assert score(better, device) > score(worse, device)
    for built, device in (("sm80", "sm90a"), ("sm89", "sm86"), ("sm100a", "sm103a")):
        assert score(built, device) is None
    with pytest.raises(ValueError, match="device_architecture must be .* got 'hopper'"):
        score("sm90a", "hopper")
    with pytest.raises(ValueError, match="binary_target must be .* got '90a'"):
        score("90a", "sm90a")


def test_the_best_module_of_each_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert jit_env.get_aot_artifacts("norm") == () == jit_env.get_aot_providers()
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    publish(tmp_path / "aot", "norm", ["80"])
    hopper = publish(tmp_path / "aot", "norm", ["80", "90a"])
    host = publish(tmp_path / "aot", "plan", [])
    (found,) = jit_env.get_aot_artifacts("norm")
    assert found.path == hopper and found.cuda_architectures == {"sm80", "sm90a"}
    assert found.provider_id == str(tmp_path / "aot")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.0a")
    assert jit_env.get_aot_artifacts("norm") == ()
    (planner,) = jit_env.get_aot_artifacts("plan")
    assert (planner.path, planner.cuda_architectures) == (host, None)


def test_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))
    monkeypatch.setattr(places, "jit_cache_package", lambda: tmp_path / "package")
    publish(tmp_path / "aot", "norm", ["90a"])
    publish(tmp_path / "package", "page", ["80"])
    first, second = jit_env.get_aot_providers()
    assert (first.provider_id, first.distribution) == (str(tmp_path / "aot"), "")
    assert (second.provider_id, second.version) == ("flashinfer-jit-cache", __version__)
    assert second.distribution == "flashinfer-jit-cache"
    assert second.jit_cache_dir == tmp_path / "package"
    assert second.modules == {"page"} and second.cuda_architectures == {"sm80"}
