"""The loss of a language model on held-out text, in the three usual units. None of it is covered by the guarantee.

    loss               mean negative log-likelihood of a token given those before it, in nats
    perplexity         exp(loss)
    bits_per_character total negative log-likelihood / ln 2 / characters; for characters as tokens loss / ln 2

Text is split into windows of the model's length. Every token but the first of a text is predicted exactly once, from
the tokens before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dpformer.errors import DpformerError
from dpformer.models import Batch, SequenceModel
from dpformer.models.softmax_head import softmax_loss

POSITIONS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class LanguageLoss:
    """Sums over held-out text."""

    nats: float  # total
    tokens: int  # number of predicted tokens
    characters: int  # length of the text

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    def to_dict(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "bits_per_character": self.nats / math.log(2) / self.characters,
            "perplexity": math.exp(min(self.loss, 700.0)),
            "tokens": self.tokens,
            "characters": self.characters,
        }


def language_loss(model: SequenceModel, texts: Sequence[np.ndarray], characters: int | None = None) -> LanguageLoss:
    """The loss of a model in evaluation mode on texts of token numbers.

    Args:
        model: predicts the next token.
        texts: arrays of tokens, each predicted independently.
        characters: number of characters of the texts; by default the number of predicted tokens.
    """
    windows = [
        text[at : at + model.max_length + 1] for text in texts for at in range(0, len(text) - 1, model.max_length)
    ]
    if not windows:
        raise DpformerError("there is no held-out text of two tokens or more")
    windows.sort(key=len, reverse=True)
    nats, tokens = 0.0, 0
    step = max(1, POSITIONS_AT_ONCE // model.max_length)
    for start in range(0, len(windows), step):
        batch = Batch.from_histories(windows[start : start + step], model.max_length).to(model.bias.device)
        with torch.no_grad():
            losses = softmax_loss(model.hidden(batch), model.output_weight(), batch.targets, bias=model.bias)
        nats += float((losses.double() * batch.lengths).sum())
        tokens += int(batch.lengths.sum())
    if not math.isfinite(nats):
        raise DpformerError("the loss on held-out text is not finite: training has diverged")
    return LanguageLoss(nats, tokens, characters or tokens)


def generate(
    model: SequenceModel,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    never: int | None = None,
    seed: int | None = None,
) -> list[int]:
    """`length` tokens after the prompt, drawn one by one from the model. Post-processing: it spends no budget.

    Args:
        model: in evaluation mode.
        prompt: token numbers, at least one; the model sees the last `max_length` of prompt and text.
        length: number of tokens to draw.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_k: sample only from the k most likely tokens.
        never: a token that is never drawn.
        seed: random seed, for reproducible text.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            scores = model.scores([text[-model.max_length :]])[0].double().cpu()  # like the generator
        if never is not None:
            scores[never] = -math.inf
        if top_k is not None and top_k < len(scores):
            scores[scores < scores.topk(top_k).values[-1]] = -math.inf
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            text.append(int(torch.multinomial(torch.softmax(scores / temperature, -1), 1, generator=generator)))
    return text[len(prompt) :]
