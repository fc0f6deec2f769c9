"""Sampling text from a decoder.

Every new token runs the model over the whole window again: fit for a look at what a model has learned, not for serving.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moesaic.mesh.device import device
from moesaic.model.decoder import Decoder
from moesaic.train import checkpoint
from moesaic.train.checkpoint import CheckpointError
from moesaic.train.data.tokenizers import Tokenizer, load_tokenizer


@torch.no_grad()
def generate(
    decoder: Decoder,
    ids: list[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    window: int | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields up to `tokens` token ids that follow `ids` (at least one).

    temperature 0 takes the likeliest token; top_k > 0 samples among that many; the same seed gives the same text.
    The model sees the last `window` tokens, by default as many as it has positions. Ends after the id `stop`.
    """
    decoder.eval()
    where = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    window = min(window or decoder.spec.max_positions, decoder.spec.max_positions)
    seen = list(ids)
    for _ in range(tokens):
        ids_BS = torch.tensor([seen[-window:]], device=where)
        logits_V = decoder.logits(decoder.hidden(ids_BS)[-1])
        chosen = sample(logits_V.float().cpu(), temperature, top_k, generator)
        yield chosen
        if chosen == stop:
            return
        seen.append(chosen)


def sample(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from fp32 logits."""
    if temperature <= 0:
        return int(logits_V.argmax())
    # The largest becomes 0 first, so that no temperature, however low, divides into infinities.
    logits_V = ((logits_V - logits_V.max()).double() / temperature).float()
    if 0 < top_k < logits_V.numel():
        least = torch.topk(logits_V, top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits_V, 0), 1, generator=generator))


def continue_text(
    path: str | Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    tokenizer: str | None = None,
) -> Iterator[str]:
    """Yields the prompt, then pieces of text as they are sampled from the checkpoint that `path` means.

    `tokenizer` defaults to the one of the checkpoint's run. Raises MoesaicError when the checkpoint or its tokenizer
    cannot be found, or the prompt has ids beyond the model's vocabulary.
    """
    folder = checkpoint.find(path)
    coder = load_tokenizer(tokenizer) if tokenizer else _tokenizer_of(folder)
    decoder = checkpoint.load_model_checkpoint(folder).to(device().torch_device)
    if prompt.encode("utf-8", "replace").decode() != prompt:
        raise CheckpointError(f"The prompt {prompt!r} is not UTF-8 text.")
    ids = coder.encode(prompt)
    if not ids:
        ids = [coder.document_end if coder.document_end is not None else 0]
    vocabulary = decoder.spec.vocab
    if max(ids) >= vocabulary:
        raise CheckpointError(
            f"The prompt has token id {max(ids)}, but the model of {folder} knows {vocabulary} ids: give its own "
            "tokenizer with --tokenizer."
        )
    yield prompt
    shown, new = "", []
    for chosen in generate(
        decoder,
        ids,
        tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        window=_window(folder),
        stop=coder.document_end,
    ):
        new.append(chosen)
        text = coder.decode(new)
        # A character may take several tokens; it is shown when it is whole.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def _run_keys(folder: Path) -> dict[str, dict[str, object]]:
    try:
        return tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return {}


def _tokenizer_of(folder: Path) -> Tokenizer:
    saved = checkpoint.tokenizer_folder(folder)
    if saved is not None and (saved / "tokenizer.json").is_file():
        return load_tokenizer(saved)
    named = _run_keys(folder).get("data", {}).get("tokenizer")
    if not named:
        raise CheckpointError(f"{folder} does not say which tokenizer it was trained with: give one with --tokenizer.")
    return load_tokenizer(str(named))


def _window(folder: Path) -> int | None:
    """The length of sequence that the model was trained on, where known."""
    length = _run_keys(folder).get("train", {}).get("seq_len")
    return int(str(length)) if length else None
