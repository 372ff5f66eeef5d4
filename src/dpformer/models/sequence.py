"""The base of all sequence models: item embeddings in, a softmax over all items out, one loss per user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dpformer.clipping.functions import on_all_users
from dpformer.models.batch import Batch
from dpformer.models.softmax_head import softmax_loss


class SequenceModel(nn.Module):
    """Predicts the next item of a history: logits = h_t Eᵀ + bias, h_t a function of the items up to t.

    A subclass defines `encode(items, lengths) -> h`. E is the input embedding itself if `shared` (the paper's default),
    and a separate parameter otherwise. `bias` (M,) is not trained: zero, or the log-frequencies of `set_frequencies`.

    Initialisation, for training under noise. E ~ N(0, 0.02²) and ‖h‖ ≤ √d, so every logit starts within a few tenths of
    the bias: the model starts at popularity (or uniform) instead of spending budget on unlearning random preferences.
    The same small numbers would vanish as an input, so rows are multiplied by √d at the input, as in Vaswani et al.
    (NDCG@10 on the synthetic data, post-norm, σ 1.6, B 512, 120 steps, one seed: 21.8%; without √d, 20.5%).
    """

    bias: Tensor
    arguments: dict[str, Any]  # of the constructor: together with the state they rebuild the model

    def __init__(self, num_items: int, max_length: int, dim: int, shared: bool) -> None:
        super().__init__()
        for name, value in (("num_items", num_items), ("max_length", max_length), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.num_items, self.max_length, self.dim = num_items, max_length, dim
        self.items = nn.Embedding(num_items, dim)
        nn.init.normal_(self.items.weight, std=0.02)
        self.output = None if shared else nn.Parameter(torch.randn(num_items, dim) * 0.02)
        self.register_buffer("bias", torch.zeros(num_items))

    @torch.no_grad()
    def initialise_items(self, factors: Tensor) -> None:
        """Initialise the rows of E by factors (M, d), such as those of `low_rank_items`; rows of zeros are ignored."""
        known = factors.any(1)
        for table in (self.items.weight, self.output):
            if table is not None:
                table[known] = factors[known].to(table)

    @torch.no_grad()
    def continue_from(self, earlier: SequenceModel, rows: Tensor) -> None:
        """Take the weights of an earlier network of the same sizes; item i was its item rows[i], or -1: it is new."""
        then, known = dict(earlier.named_parameters()), rows >= 0
        for name, parameter in self.named_parameters():
            if parameter is self.items.weight or parameter is self.output:
                parameter[known] = then[name][rows[known]].to(parameter)
            else:
                parameter.copy_(then[name])

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        """(B, L) items, (B,) lengths -> (B, L, d) hidden states; those beyond a row's length are meaningless."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """The loss of each user, (B,): mean cross-entropy over the user's own targets, 0 if there are none."""
        hidden = self.hidden(batch)
        return softmax_loss(hidden, self.output_weight(), batch.targets, bias=self.bias)

    def hidden(self, batch: Batch) -> Tensor:
        """(B, L, d), after validating the input."""
        longest = batch.items.shape[1]
        if longest > self.max_length:
            raise ValueError(
                f"a history has {longest} items, but the model takes {self.max_length}: keep the last ones"
            )
        _refuse_unknown(batch.items, self.num_items)
        return self.encode(batch.items, batch.lengths)

    def scores(self, histories: Batch | Sequence[ArrayLike]) -> Tensor:
        """(B, M): the logit of every item following each history; call `eval()` first to switch dropout off.

        A history without items gets only the bias. Histories that are too long keep their last items.
        """
        return F.linear(self.final_state(histories), self.output_weight(), self.bias)

    def final_state(self, histories: Batch | Sequence[ArrayLike]) -> Tensor:
        """(B, d): the hidden state at the end of each history, zero for an empty one. scores = h Eᵀ + bias."""
        if not isinstance(histories, Batch):
            histories = Batch.for_scores(histories, self.max_length).to(self.bias.device)
        return _final(self.hidden(histories), histories.lengths)

    def next_scores(self, items: Tensor, lengths: Tensor) -> Tensor:
        """`scores` of plain tensors, without checks and branches, for export."""
        return F.linear(_final(self.encode(items, lengths), lengths), self.output_weight(), self.bias)

    def output_weight(self) -> Tensor:
        """(M, d) the rows of the softmax."""
        return self.items.weight if self.output is None else self.output

    def embed(self, items: Tensor) -> Tensor:
        """(B, L) -> (B, L, d), about 0.16 per coordinate initially."""
        return self.items(items) * math.sqrt(self.dim)

    def set_frequencies(self, frequencies: Tensor) -> None:
        """Add log(p_i / Σ p) to the logits: popularity from the first step, without training.

        `frequencies` (M,) are public or released with DP; a frequency of zero counts as half the smallest one.
        """
        p = _checked_frequencies(frequencies, self.num_items).to(self.bias)
        seen = p[p > 0]
        if len(seen) == 0:
            raise ValueError("all frequencies are 0; give at least one item a frequency")
        p = p.clamp(min=float(seen.min()) / 2)
        self.bias.copy_((p / p.sum()).log())


@on_all_users
def _refuse_unknown(items: Tensor, num_items: int) -> None:
    largest, smallest = (int(items.max()), int(items.min())) if items.numel() else (0, 0)
    if largest >= num_items or smallest < 0:
        seen = largest if largest >= num_items else smallest
        raise ValueError(f"item {seen} is outside the vocabulary 0 … {num_items - 1}; map ids first")


def _final(hidden: Tensor, lengths: Tensor) -> Tensor:
    last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, last)[:, 0] * (lengths > 0)[:, None]


def constructor_arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, including defaults: `locals()` on its first line, without `self`."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__")}


def _checked_frequencies(frequencies: Tensor, num_items: int) -> Tensor:
    p = torch.as_tensor(frequencies).detach()
    if p.shape != (num_items,):
        raise ValueError(
            f"frequencies have shape {tuple(p.shape)}; the model has {num_items} items: give shape ({num_items},)"
        )
    if not bool((torch.isfinite(p) & (p >= 0)).all()):
        raise ValueError("a frequency is negative or not finite; give probabilities, 0 or more")
    return p
