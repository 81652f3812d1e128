"""Rotary position embedding: in place, out of place, and quantised."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import make_tensor

from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_TOKENS = Flag("batch_size", positive, 8192, "tokens")
_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of q and k")
_HEADS = [
    Flag("num_qo_heads", positive, 32, "heads of q"),
    Flag("num_kv_heads", positive, 8, "heads of k"),
    Flag("head_dim", positive, 128, "elements of a head"),
]
_LAYOUT = [Flag("interleave", bool, False, "pairs are (2 j, 2 j + 1)")]
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
    factors = {"rope_scale": 1.0, "rope_theta": 1e4}
    return {"q": q, "k": k, "pos_ids": pos_ids, "interleave": case.interleave, **factors}


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


def _quantized_bytes(arguments: Arguments) -> int:
    names = ("q_rope", "k_rope", "q_nope", "k_nope")
    return sum(arguments[name].numel() for name in names)


def _copied_bytes(arguments: Arguments) -> int:
    return sum(arguments[name].nbytes for name in ("q", "k"))


for _name, _writes in (("apply_rope_pos_ids", []), ("apply_rope_pos_ids_inplace", ["q", "k"])):
    register(
        Routine(
            name=_name,
            api=f"flashinfer.rope:{_name}",
            flags=[_TOKENS, *_HEADS, _DTYPE, *_LAYOUT],
            build=_build_computed,
            reads=["q", "k", "pos_ids"],
            writes=_writes,
            fresh=None if _writes else _copied_bytes,
            backends={"cuda": Backend(f"flashinfer.rope:{_name}")},
        )
    )
_name = "apply_rope_with_cos_sin_cache_inplace"
register(
    Routine(
        name=_name,
        api=f"flashinfer.rope:{_name}",
        flags=[_TOKENS, *_HEADS, _DTYPE, *_LAYOUT],
        build=_build_cached,
        reads=["query", "key", "positions", "cos_sin_cache"],
        writes=["query", "key"],
        backends={"cuda": Backend(f"flashinfer.rope:{_name}")},
    )
)
register(
    Routine(
        name="mla_rope_quantize_fp8",
        api="flashinfer.rope:mla_rope_quantize_fp8",
        flags=[_TOKENS, _DTYPE, *_LATENT],
        build=_build_latent,
        reads=["q_rope", "k_rope", "q_nope", "k_nope", "cos_sin_cache", "pos_ids"],
        writes=[],
        fresh=_quantized_bytes,
        backends={"cuda": Backend("flashinfer.rope:mla_rope_quantize_fp8")},
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
        backends={"cuda": Backend("flashinfer.norm:fused_qk_rmsnorm_rope")},
    )
)
