"""Greedy tokens of the engine against another implementation on the same checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import TensorFiles, load, write_random_checkpoint
from .config import ModelConfig
from .engine import Engine, SamplingParams
from .plain import PlainModel

# Of logits computed with bfloat16 activations, in standard deviations of the logits: about 1.5
# times what transformers itself loses in bfloat16.
ROUNDING = 0.06

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Tokens to their logits, ``[len(tokens), vocab]`` float32 on the CPU."""


@dataclass
class Agreement:
    """How greedy tokens compare.

    Attributes
    ----------
    against : str
        The other implementation, and why it is that one.
    tokens : int
        Tokens compared.
    equal : int
        Number of these with the other's largest logit.
    below, allowed : float
        How far the logit of a token is below the largest at most, and what rounding explains.
    """

    against: str
    tokens: int
    equal: int
    below: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.below <= self.allowed

    def __str__(self) -> str:
        ties = self.tokens - self.equal
        text = f"{self.equal} of {self.tokens} greedy tokens identical to {self.against}"
        if ties:
            text += (
                f"; {ties} where logits tie: at most {self.below:.3f} below the largest, "
                f"rounding explains {self.allowed:.3f}"
            )
        return f"{text}: {'agrees' if self.holds else 'DIFFERS'}"


def check_greedy(device: str, prompts: int = 4, tokens: int = 16) -> Agreement:
    """Serve the small random checkpoint, all prompts at a time, and compare every token.

    Each token is compared given the tokens before it, in float32.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_random_checkpoint(temporary)
        model, tokenizer = load(folder, device)
        against, logits_of = reference(folder)
    engine = Engine(model, tokenizer, num_pages=64 * prompts, use_cuda_graph=device != "cpu")
    generator = torch.Generator().manual_seed(0)
    sequences = {
        str(i): torch.randint(256, (10 + 7 * i,), generator=generator).tolist()
        for i in range(prompts)
    }
    lengths = {name: len(sequence) for name, sequence in sequences.items()}
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for name, sequence in sequences.items():
        engine.add_request(name, list(sequence), params)
    while engine.has_work:
        for output in engine.step():
            sequences[output.request_id].append(output.token_id)
    equal, below, spread = 0, 0.0, 0.0
    for name, sequence in sequences.items():
        logits = logits_of(sequence[:-1])[lengths[name] - 1 :]
        chosen = logits.gather(1, torch.tensor(sequence[lengths[name] :])[:, None])[:, 0]
        distance = logits.max(-1).values - chosen
        equal += int((distance == 0).sum())
        below = max(below, float(distance.max()))
        spread = max(spread, float(logits.std()))
    # Each of two logits may be off by as much.
    return Agreement(against, prompts * tokens, equal, below, 2 * ROUNDING * spread)


def reference(folder: Path) -> tuple[str, Logits]:
    """Another implementation of a checkpoint, with its name: `transformers` if it is there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    except (ImportError, RuntimeError) as error:  # the latter: parts of it that do not import
        why = str(error).splitlines()[0]
        name = f"plain PyTorch in float32 (transformers is not importable: {why})"
        config = ModelConfig.from_folder(folder)
        return name, PlainModel(config, dict(TensorFiles(folder, "cpu", torch.float32)))

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(tokens)])).logits[0]

    return f"transformers {transformers.__version__} in float32", logits
