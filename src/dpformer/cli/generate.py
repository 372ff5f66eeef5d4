"""`dpformer generate RUN --prompt …`: text from a released language model."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from dpformer.errors import DpformerError


def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, or a model.safetensors file.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    length: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always takes the most likely token.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, for reproducible text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text with a language model. This spends no privacy budget, however much is generated."""
    if length < 0 or (top_k is not None and top_k < 1):
        raise DpformerError(f"length is {length} and top-k {top_k}; they must not be negative, and top-k 1 or more")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise DpformerError(f"temperature is {temperature}; it must be a finite number, 0 or more")
    from dpformer.data.text import decoder
    from dpformer.evaluation.language import generate as draw
    from dpformer.runs.model_file import load_release, model_file

    release = load_release(model_file(run))
    tokens, decode = decoder(release)
    start = tokens.encode(prompt or "\n").tolist()
    if not start:
        raise DpformerError("the prompt has no tokens; give some text")
    drawn = draw(release.model, start, length, temperature=temperature, top_k=top_k, never=tokens.unknown, seed=seed)
    text = decode(drawn)
    typer.echo(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) if as_json else prompt + text)
