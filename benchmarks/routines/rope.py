"""Rotary position embedding: in place, out of place, quantised, and appended to a cache."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from flashinfer.testing import make_tensor

from .base import Arguments, Flag, Routine, dtype_name, positive, register, torch_dtype

_TOKENS = Flag("batch_size", positive, 8192, "tokens")
_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of q and k")
_HEADS = [
    Flag("num_qo_heads", positive, 32, "heads of q"),
    Flag("num_kv_heads", positive, 8, "heads of k"),
    Flag("head_dim", positive, 128, "elements of a head"),
]
_LAYOUT = [Flag("interleave", bool, False, "pairs are (2 j, 2 j + 1)")]
_REQUESTS = Flag("num_requests", positive, 8, "requests that the tokens belong to")
_PARTS = [
    Flag("nope_dim", positive, 64, "elements of a head that are not rotated"),
    Flag("rope_dim", positive, 64, "elements of a head that are"),
    Flag("enable_pdl", bool, False, "programmatic dependent launch"),
]
_CACHE = [
    Flag("page_size", positive, 16, "slots of a page"),
    Flag("hnd", bool, False, "heads before slots in the cache"),
]
_LATENT = [
    Flag("num_heads", positive, 128, "heads of q; k has one"),
    Flag("nope_dim", positive, 512, "elements of a head that are not rotated"),
    Flag("rope_dim", positive, 64, "elements of a head that are"),
    Flag("enable_pdl", bool, False, "programmatic dependent launch"),
]


def cos_sin_cache(rows: int, rotary_dim: int, device: str) -> torch.Tensor:
    """Cosines and sines of the first positions, base 10000."""
    exponent = torch.arange(rotary_dim // 2, device=device) / (rotary_dim // 2)
    angle = torch.arange(rows, device=device)[:, None] * 1e4**-exponent
    return torch.cat([angle.cos(), angle.sin()], -1)


def _heads(case: Namespace, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch_dtype(case.input_dtype)
    shapes = ((case.batch_size, n, case.head_dim) for n in (case.num_qo_heads, case.num_kv_heads))
    q, k = (make_tensor(*shape, dtype=dtype, device=device) for shape in shapes)
    return q, k


def _build_computed(case: Namespace, device: str) -> Arguments:
    q, k = _heads(case, device)
    pos_ids = torch.arange(case.batch_size, dtype=torch.int32, device=device)
    return {"q": q, "k": k, "pos_ids": pos_ids, "interleave": case.interleave}


def _build_ragged(case: Namespace, device: str) -> Arguments:
    """Requests of as equal lengths as can be, each after a context of 100 tokens."""
    q, k = _heads(case, device)
    bounds = torch.linspace(0, case.batch_size, case.num_requests + 1, device=device).int()
    where = {"indptr": bounds, "offsets": torch.full_like(bounds[1:], 100)}
    return {"q": q, "k": k, **where, "interleave": case.interleave}


def _build_cached(case: Namespace, device: str) -> Arguments:
    q, k = _heads(case, device)
    return {
        "positions": torch.arange(case.batch_size, dtype=torch.int32, device=device),
        "query": q,
        "key": k,
        "head_size": case.head_dim,
        "cos_sin_cache": cos_sin_cache(case.batch_size, case.head_dim, device),
        "is_neox": not case.interleave,
    }


def _build_latent(case: Namespace, device: str) -> Arguments:
    dtype = torch_dtype(case.input_dtype)

    def draw(*shape: int) -> torch.Tensor:
        return make_tensor(*shape, dtype=dtype, device=device)

    return {
        "q_rope": draw(case.batch_size, case.num_heads, case.rope_dim),
        "k_rope": draw(case.batch_size, case.rope_dim),
        "q_nope": draw(case.batch_size, case.num_heads, case.nope_dim),
        "k_nope": draw(case.batch_size, case.nope_dim),
        "cos_sin_cache": cos_sin_cache(case.batch_size, case.rope_dim, device),
        "pos_ids": torch.arange(case.batch_size, dtype=torch.int32, device=device),
        "quant_scale_q": 1.0,
        "quant_scale_kv": 1.0,
        "enable_pdl": case.enable_pdl,
    }


def _build_parts(case: Namespace, device: str) -> Arguments:
    """The heads of queries and keys in two parts, of which one is rotated."""
    dtype = torch_dtype(case.input_dtype)
    parts = {
        f"{name}_{part}": make_tensor(case.batch_size, heads, dim, dtype=dtype, device=device)
        for part, dim in (("rope", case.rope_dim), ("nope", case.nope_dim))
        for name, heads in (("q", case.num_qo_heads), ("k", case.num_kv_heads))
    }
    return {
        **parts,
        "cos_sin_cache": cos_sin_cache(case.batch_size, case.rope_dim, device),
        "pos_ids": torch.arange(case.batch_size, dtype=torch.int32, device=device),
        "enable_pdl": case.enable_pdl,
    }


def _build_append(case: Namespace, device: str) -> Arguments:
    """One request, whose pages are in random places."""
    arguments = _build_parts(case, device)
    head_dim = case.rope_dim + case.nope_dim
    pages = -(-case.batch_size // case.page_size)
    inner = (case.page_size, case.num_kv_heads)
    shape = (pages, *(inner[::-1] if case.hnd else inner), head_dim)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    value = (case.batch_size, case.num_kv_heads, head_dim)
    return {
        **arguments,
        "v": make_tensor(*value, dtype=torch_dtype(case.input_dtype), device=device),
        "paged_kv_cache": tuple(
            torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)
        ),
        "kv_indices": torch.randperm(pages).int().to(device),
        "kv_indptr": torch.tensor([0, pages], **int32),
        "batch_indices": torch.zeros(case.batch_size, **int32),
        "positions": torch.arange(case.batch_size, **int32),
        "page_size": case.page_size,
        "kv_layout": "HND" if case.hnd else "NHD",
    }


def _build_turned(case: Namespace, device: str) -> Arguments:
    """One request, whose pages are in random places; heads have norms."""
    arguments = _build_append(Namespace(**vars(case), rope_dim=case.head_dim, nope_dim=0), device)
    dtype = torch_dtype(case.input_dtype)
    q, k = (arguments.pop(f"{name}_rope") for name in ("q", "k"))
    del arguments["q_nope"], arguments["k_nope"]
    caches = tuple(cache.to(dtype) for cache in arguments["paged_kv_cache"])
    weights = {f"{name}_weight": torch.ones_like(q[0, 0]) for name in ("q", "k")}
    return {**arguments, **weights, "q": q, "k": k, "paged_kv_cache": caches}


def _appended_bytes(arguments: Arguments) -> int:
    return sum(int(arguments[name].nbytes) for name in ("k", "v"))


def _quantized_bytes(arguments: Arguments) -> int:
    names = ("q_rope", "k_rope", "q_nope", "k_nope", "v")
    return sum(arguments[name].numel() for name in names if name in arguments)


def _rotation(name: str, more: list[Flag], build, tensors: list[str], where: list[str]) -> None:
    """A rotation of `tensors`, and the same in place."""

    def copied_bytes(arguments: Arguments) -> int:
        return sum(arguments[tensor].nbytes for tensor in tensors)

    for inplace in (False, True):
        api = f"flashinfer.rope:{name}{'_inplace' if inplace else ''}"
        register(
            Routine(
                name=api.split(":")[1],
                api=api,
                flags=[_TOKENS, *more, *_HEADS, _DTYPE, *_LAYOUT],
                build=build,
                reads=[*tensors, *where],
                writes=tensors if inplace else [],
                fresh=None if inplace else copied_bytes,
            )
        )


for _name in ("apply_rope", "apply_llama31_rope"):
    _rotation(_name, [_REQUESTS], _build_ragged, ["q", "k"], ["indptr", "offsets"])
    _rotation(f"{_name}_pos_ids", [], _build_computed, ["q", "k"], ["pos_ids"])
_angles = ["positions", "cos_sin_cache"]
_rotation("apply_rope_with_cos_sin_cache", [], _build_cached, ["query", "key"], _angles)

_INPUTS = ["q_rope", "k_rope", "q_nope", "k_nope", "cos_sin_cache", "pos_ids"]
for _name, _flags, _build, _more in (
    ("mla_rope_quantize_fp8", _LATENT, _build_latent, []),
    ("rope_quantize_fp8", [*_HEADS[:2], *_PARTS], _build_parts, []),
    (
        "rope_quantize_fp8_append_paged_kv_cache",
        [*_HEADS[:2], *_PARTS, *_CACHE],
        _build_append,
        ["v", "batch_indices", "positions"],
    ),
):
    register(
        Routine(
            name=_name,
            api=f"flashinfer.rope:{_name}",
            flags=[_TOKENS, _DTYPE, *_flags],
            build=_build,
            reads=[*_INPUTS, *_more],
            writes=[],
            fresh=_quantized_bytes,
        )
    )

register(
    Routine(
        name="rope_append_paged_kv_cache",
        api="flashinfer.rope:rope_append_paged_kv_cache",
        flags=[_TOKENS, *_HEADS, _DTYPE, *_CACHE, _PARTS[2]],
        build=_build_turned,
        reads=["q", "k", "v", "cos_sin_cache", "pos_ids", "batch_indices", "positions"],
        writes=["q"],
        fresh=_appended_bytes,
    )
)

_CHANNELS = ("num_frame_channels", "num_height_channels", "num_width_channels")


def _build_video(case: Namespace, device: str) -> Arguments:
    """One video of square pictures, with as many heads of q, k and v."""
    dtype = torch_dtype(case.input_dtype)
    width = case.num_heads * case.head_dim
    # Wan's division: a sixth of the pairs for row and column each, the rest for the frame.
    side = 2 * (case.head_dim // 6)
    channels = (case.head_dim - 2 * side, side, side)
    tokens = case.frames * case.side**2
    return {
        "qkv": make_tensor(tokens, 3 * width, dtype=dtype, device=device),
        "q_weight": make_tensor(width, dtype=dtype, device=device, mean=1.0, std=0.1),
        "k_weight": make_tensor(width, dtype=dtype, device=device, mean=1.0, std=0.1),
        **dict(zip(("ppf", "pph", "ppw"), (case.frames, case.side, case.side), strict=True)),
        **dict(zip(_CHANNELS, channels, strict=True)),
        **{f"num_heads_{name}": case.num_heads for name in "qkv"},
        "head_dim": case.head_dim,
        "output_fp8": case.fp8,
    }


def _video_bytes(arguments: Arguments) -> int:
    qkv = arguments["qkv"]
    return qkv.numel() * (1 if arguments["output_fp8"] else qkv.element_size())


register(
    Routine(
        name="fused_qk_rmsnorm_rope",
        api="flashinfer.norm:fused_qk_rmsnorm_rope",
        flags=[
            Flag("frames", positive, 8, "frames of the video"),
            Flag("side", positive, 32, "rows and columns of a frame, in patches"),
            Flag("num_heads", positive, 40, "heads of q, of k and of v"),
            Flag("head_dim", positive, 128, "elements of a head"),
            _DTYPE,
            Flag("fp8", bool, False, "results in float8_e4m3fn"),
        ],
        build=_build_video,
        reads=["qkv", "q_weight", "k_weight"],
        writes=[],
        fresh=_video_bytes,
    )
)
