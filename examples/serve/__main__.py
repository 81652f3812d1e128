"""Command line: `python -m examples.serve generate|bench|serve`."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import torch

from .engine import Engine, SamplingParams, load
from .mistakes import lacking, reported
from .options import kernels_option

# Imported when named: the server needs an extra, and `--help` no library of theirs.
_COMMANDS = {"bench": "bench", "serve": "server"}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_COMMANDS])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return super().get_command(ctx, name)
        try:
            module = importlib.import_module(f"{__package__}.{_COMMANDS[name]}")
        except ImportError as error:
            # `--help` of the group lists every command, whether or not it can run.
            return click.Command(name, callback=_unavailable(error), short_help=str(error))
        return getattr(module, name)


def _unavailable(error: ImportError):
    def fail() -> None:
        raise click.ClickException(str(error))

    return fail


@click.group(cls=_Commands)
def main() -> None:
    """Serve a language model with FlashInfer."""


@main.command()
@kernels_option
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A prompt per line; with those of the command line.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]))
@click.option("--max-tokens", default=32, help="Tokens to generate for each prompt.")
@click.option("--temperature", default=0.0, help="0: always the most probable token.")
@click.option("--top-k", default=0, help="0: all tokens.")
@click.option("--top-p", default=1.0)
@click.option("--min-p", default=0.0)
@click.option("--seed", type=int, help="Default: a random one.")
@click.option("--num-pages", default=2048, help="Pages of the KV cache.")
@click.option("--page-size", default=16, help="Tokens per page.")
@click.option("--fp8-kv", is_flag=True, help="Keep keys and values as float8_e4m3fn.")
@click.option("--cuda-graph/--no-cuda-graph", default=None, help="Default: on a GPU.")
@click.option("--tensor-parallel", default=1, help="GPUs that divide the model, under torchrun.")
@click.option("--expert-parallel", is_flag=True, help="They have whole experts, not parts of each.")
def generate(
    prompts, path, model, device, dtype, max_tokens, temperature, top_k, top_p, min_p, seed,
    num_pages, page_size, fp8_kv, cuda_graph, tensor_parallel, expert_parallel,
):  # fmt: skip
    """Continue one prompt, streaming its text, or several at once, with a progress bar."""
    with reported():
        texts = [*prompts]
        if path:
            texts += [line for line in path.read_text().splitlines() if line]
        if not texts:
            raise ValueError("give a prompt, or --file with some")
        parallel = None
        if expert_parallel and tensor_parallel < 2:
            raise ValueError("--expert-parallel needs --tensor-parallel of at least 2")
        if tensor_parallel > 1:
            from .parallel import join

            parallel = join(tensor_parallel, expert_parallel)
            device = parallel.device
            seed = 0 if seed is None else seed  # all ranks draw alike
        loaded, tokenizer = load(model, device, getattr(torch, dtype), parallel)
        engine = Engine(
            loaded,
            tokenizer,
            num_pages=num_pages,
            page_size=page_size,
            kv_dtype=torch.float8_e4m3fn if fp8_kv else None,
            use_cuda_graph=device.startswith("cuda") if cuda_graph is None else cuda_graph,
        )
        for number, text in enumerate(texts):
            params = SamplingParams(temperature, top_k, top_p, min_p, seed, max_tokens)
            engine.add_request(str(number), text, params)
    with lacking():
        if parallel is not None and parallel.rank != 0:
            while engine.has_work:
                engine.step()
        elif len(texts) == 1:
            _stream(engine)
        else:
            _collect(engine, texts, max_tokens)


def _stream(engine: Engine) -> None:
    while engine.has_work:
        for output in engine.step():
            click.echo(output.text, nl=output.finished)


def _collect(engine: Engine, prompts: list[str], max_tokens: int) -> None:
    from tqdm import tqdm

    answers = [""] * len(prompts)
    with tqdm(total=len(prompts) * max_tokens, unit="token") as bar:
        while engine.has_work:
            for output in engine.step():
                number = int(output.request_id)
                answers[number] += output.text
                bar.update()
                if output.finished:
                    with bar.external_write_mode():
                        click.echo(f"[{number}] {prompts[number]!r} -> {answers[number]!r}")


if __name__ == "__main__":
    main(prog_name="python -m examples.serve")
