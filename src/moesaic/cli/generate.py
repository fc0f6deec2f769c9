"""`moesaic generate`: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A step-N folder, or a run's folder for its newest checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; empty starts a document.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0 among all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help='"bytes", a tokenizer.json or its folder; by default the run\'s own.')
    ] = None,
) -> None:
    """Continue a text with a checkpoint's model.

    Each token runs the whole window again: for a look at what a model has learned, not for serving.
    """
    from moesaic.train.generate import continue_text

    for piece in continue_text(
        checkpoint, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, tokenizer=tokenizer
    ):
        print(piece, end="", flush=True)
    print()
