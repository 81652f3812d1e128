"""Loading folders: what is read, what is refused, and the command line on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from examples.serve.__main__ import main
from examples.serve.checkpoint import SMALL, TensorFiles, load, write_random_checkpoint
from examples.serve.config import ModelConfig
from examples.serve.rope import rope_cache
from examples.serve.tokens import BYTE_LEVEL_FILE, TextStream, load_tokenizer

TINY = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
TINY["max_position_embeddings"] = 64


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def test_a_random_checkpoint_is_that_of_its_seed(tmp_path: Path):
    first = load(write_random_checkpoint(tmp_path / "a", TINY, seed=1), "cpu")[0]
    again = load(write_random_checkpoint(tmp_path / "b", TINY, seed=1), "cpu")[0]
    other = load(write_random_checkpoint(tmp_path / "c", TINY, seed=2), "cpu")[0]
    assert torch.equal(first.blocks[0].body.qkv.weight, again.blocks[0].body.qkv.weight)
    assert not torch.equal(first.blocks[0].body.qkv.weight, other.blocks[0].body.qkv.weight)
    assert (
        first.head.data_ptr() == first.embedding.data_ptr()
        and first.embedding.dtype == torch.bfloat16
    )


def test_without_a_folder_a_small_model_is_made():
    model, tokenizer = load(None, "cpu", torch.float16)
    assert model.config.hidden_size == SMALL["hidden_size"] and model.dtype == torch.float16
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__norm__weight": None}, "must have 'model.norm.weight'"),
        ({"model__norm__weight": torch.ones(5)}, r"must have shape \(32,\), got \(5,\)"),
        ({"model__extra": torch.ones(5)}, r"nothing here uses: \['model.extra'\]"),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.ones(64)},
            "all or none of .*q_proj.* must have a bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    write_random_checkpoint(tmp_path, TINY)
    _edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "cpu")


def test_frequencies_of_old_checkpoints_are_left_out(tmp_path: Path):
    write_random_checkpoint(tmp_path, TINY)
    _edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert load(tmp_path, "cpu")[0].config.num_layers == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "`architectures`.*got 'GPT2LMHeadModel'"),
        ({"hidden_act": "gelu"}, "`hidden_act`.*got 'gelu'"),
        ({"quantization_config": {"quant_method": "new"}}, "`quantization_config`"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "`rope_type`.*got 'mrope'"),
        ({"num_hidden_layers": None}, "`num_hidden_layers`.*got None"),
        ({"num_key_value_heads": 3}, "`num_attention_heads` must be a multiple of .* 3, got 4"),
        ({"head_dim": 40}, "`head_dim` must be a multiple of 16 up to 256, got 40"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`.*got 0.5"),
    ],
)
def test_configurations_that_are_not_implemented(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**TINY, **changes})


def test_other_refusals(tmp_path: Path):
    with pytest.raises(ValueError, match="a folder with a config.json"):
        load(tmp_path, "cpu")
    write_random_checkpoint(tmp_path, TINY)
    with pytest.raises(ValueError, match="`dtype`.*got torch.float32"):
        load(tmp_path, "cpu", torch.float32)
    (tmp_path / BYTE_LEVEL_FILE).unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        load(tmp_path, "cpu")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors files"):
        load(tmp_path, "cpu")


def test_configurations_of_the_previous_format():
    """Windows and scaling as older files spell them."""
    scaling = {"type": "linear", "factor": 4.0}
    old = ModelConfig.from_dict({**TINY, "rope_theta": 100.0, "rope_scaling": scaling})
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    new = ModelConfig.from_dict({**TINY, "rope_parameters": parameters})
    assert old == new
    cos_sin = rope_cache(old.rope, old.head_dim, old.max_positions)
    # Position 8 divided by 4 turns the first pair by 2, the last by 2 / 100^(7/8).
    angle = torch.tensor([2.0, 2 / 100 ** (7 / 8)])
    assert torch.allclose(cos_sin[8, [0, 7]], angle.cos())
    assert torch.allclose(cos_sin[8, [8, 15]], angle.sin())
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 6}
    windowed = ModelConfig.from_dict(
        {**TINY, **qwen, "use_sliding_window": True, "max_window_layers": 2}
    )
    assert windowed.windows == (-1, -1, 5)
    assert ModelConfig.from_dict({**TINY, **qwen}).windows == (-1, -1, -1)


def test_end_of_text_is_that_of_the_generation(tmp_path: Path):
    write_random_checkpoint(tmp_path, TINY)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == {256}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == {7, 256}


def test_a_tokenizer_of_the_tokenizers_library(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["the cat and the hat"], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "the hat 漢 of"
    tokens = tokenizer.encode(text)
    assert len(tokens) < len(text.encode()) and tokenizer.decode([*tokens, 0]) == text
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == text and pieces.count("") == 2  # a character of three tokens


def test_generate_streams_one_prompt_and_batches_many(tmp_path: Path):
    folder = str(write_random_checkpoint(tmp_path / "model", TINY))
    options = ["generate", "--model", folder, "--device", "cpu", "--max-tokens", "4"]
    one = CliRunner().invoke(main, [*options, "hello"])
    assert one.exit_code == 0 and one.stdout.endswith("\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nother\n")
    many = CliRunner().invoke(main, [*options, "--file", str(prompts)])
    assert many.exit_code == 0
    answers = dict(line.split(" -> ") for line in many.stdout.splitlines())
    assert answers["[0] 'hello'"] == repr(one.stdout[:-1]) and "[1] 'other'" in answers
    assert "8/8" in many.stderr  # the progress bar


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "give a prompt"),
        (["--top-p", "2", "x"], "`top_p` must be in (0, 1], got 2.0"),
        (["--model", "/nowhere", "x"], "a folder with a config.json, got '/nowhere'"),
        (["--max-tokens", "40000", "x"], "too long: 1 tokens of `prompt`"),
        (["--expert-parallel", "x"], "--expert-parallel needs --tensor-parallel of at least 2"),
        (["--tensor-parallel", "2", "x"], "--tensor-parallel 2 needs 2 processes, got 1"),
    ],
)
def test_mistakes_on_the_command_line(options: list[str], message: str):
    result = CliRunner().invoke(main, ["generate", "--device", "cpu", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_tensors_are_read_when_they_are_asked_for(tmp_path: Path):
    """What is left out, as other ranks' experts are, is not read."""
    write_random_checkpoint(tmp_path)
    tensors = TensorFiles(tmp_path, "cpu", torch.float16)
    read: list[str] = []

    class Recorded:
        def __init__(self, content: Any) -> None:
            self.content = content

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.content.get_tensor(name)

    tensors._files = {name: Recorded(content) for name, content in tensors._files.items()}
    name = "model.norm.weight"
    assert len(tensors) == 20 and name in tensors and not read
    del tensors["model.layers.1.mlp.up_proj.weight"]
    assert tensors.pop(name).dtype == torch.float16
    assert name not in tensors and read == [name] and len(tensors) == 18
