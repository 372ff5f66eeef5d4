"""The paper's Transformer over a user's items, plain or with Re-Attention. Read it top to bottom.

    x = √d·E[items] + P                                      item and position
    each block:  x = norm(x + attention(x));  x = norm(x + feed_forward(x))         ("post", Vaswani et al. 2017)
             or  x = x + attention(norm(x));  x = x + feed_forward(norm(x))         ("pre", and a last norm)
    logits = x Eᵀ + bias                                     (`SequenceModel`)

With Re-Attention every activation is a pair (mean, variance of its DP noise): the functions of `track` run a layer as
usual and propagate the variance. It starts from the effective error of the parameters (`set_privacy`) and is used in
one place: noisy keys receive less attention.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from dpformer.models.batch import Batch
from dpformer.models.dropout import Dropout
from dpformer.models.sequence import SequenceModel, constructor_arguments
from dpformer.reattention import moments, track
from dpformer.reattention.attention import Spread, Variant, attention
from dpformer.reattention.error import EffectiveError, effective_error
from dpformer.reattention.moments import Gaussian
from dpformer.reattention.recording import recording
from dpformer.reattention.track import Tracked

Maps = list[Tensor]  # the attention map of each block, (B, heads, L, L)


class Transformer(SequenceModel):
    """Causal self-attention over the history with learned positions.

    Args:
        num_items: M; items are 0 … M−1.
        max_length: the longest history, L.
        dim: d, the width of items and hidden states.
        heads: attention heads; they divide d.
        blocks: attention + feed-forward pairs.
        hidden: width of the feed-forward layer, 4·d if not given.
        shared: one matrix for input embedding and softmax weight (as in the paper), or two.
        reattention: False, True (rows of the corrected attention sum to one), or "literal" (as printed in the paper).
        dropout: after the embedding and after each attention and feed-forward, as in Vaswani et al.
        attention_dropout: on the attention weights.
        norm: LayerNorm after each sum ("post") or before each layer ("pre").
        activation: of the feed-forward layer, "relu" or "gelu".
    """

    item_error: Tensor  # (M,) the effective error of each item's row; only with Re-Attention
    weight_error: Tensor  # () error of every other parameter

    def __init__(
        self,
        num_items: int,
        max_length: int,
        *,
        dim: int = 64,
        heads: int = 1,
        blocks: int = 2,
        hidden: int | None = None,
        shared: bool = True,
        reattention: bool | Variant = False,
        dropout: float = 0.2,
        attention_dropout: float = 0.0,
        norm: Literal["post", "pre"] = "post",
        activation: Literal["relu", "gelu"] = "relu",
    ) -> None:
        arguments = constructor_arguments(locals())
        super().__init__(num_items, max_length, dim, shared)
        self.arguments = arguments
        _check(dim, heads, blocks, norm, activation, reattention)
        self.positions = nn.Embedding(max_length, dim)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = Dropout(dropout)
        self.reattention = bool(reattention)
        variant: Variant = "literal" if reattention == "literal" else "renormalised"
        self.blocks = nn.ModuleList(
            Block(
                SelfAttention(dim, heads, variant, attention_dropout),
                FeedForward(dim, hidden or 4 * dim, activation),
                norm,
                dropout,
                branches=2 * blocks,
            )
            for _ in range(blocks)
        )
        self.last_norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        if reattention:
            # Part of the weights: saved, loaded, exported. NaN until set_privacy, so that forgetting it is noticed.
            self.register_buffer("item_error", torch.full((num_items,), math.nan))
            self.register_buffer("weight_error", torch.tensor(math.nan))

    def encode(self, items: Tensor, lengths: Tensor, maps: Maps | None = None) -> Tensor:
        x, weight_var = self._input(items)
        x = track.dropout(self.dropout, x)
        for i, block in enumerate(self.blocks):
            x = block(x, weight_var, i == len(self.blocks) - 1, maps)
        return self.last_norm(x.mean)  # (B, L, d)

    def _input(self, items: Tensor) -> tuple[Tracked, Tensor | None]:
        """√d·E[items] + P with its variance (B, L, 1): all coordinates of a row are equally noisy."""
        places = torch.arange(items.shape[1], device=items.device)
        mean = self.embed(items) + self.positions(places)  # (B, L, d) + (L, d)
        if not self.reattention:
            return Tracked(mean, None), None
        if not recording() and bool(self.weight_error.isnan()):
            raise RuntimeError("Re-Attention needs the noise of the parameters: call model.set_privacy(...) first")
        weight_var = self.weight_error.square()
        table = Gaussian(self.items.weight.detach(), self.item_error.square()[:, None])
        positions = Gaussian(self.positions.weight.detach(), weight_var)
        with torch.no_grad():
            var = moments.embedding(items, table, positions, math.sqrt(self.dim), mean=mean).var
        return Tracked(mean, var), weight_var

    def attention_maps(self, batch: Batch) -> Maps:
        """The attention map of each block (B, heads, L, L), row = query, with the correction and without dropout."""
        maps: Maps = []
        with torch.no_grad():
            self.encode(batch.items, batch.lengths, maps)
        return maps

    def set_privacy(
        self, noise_multiplier: float, expected_batch_size: float, frequencies: Tensor, scale: float = 1.0
    ) -> None:
        """Set the noise of the parameters for Re-Attention (`effective_error`); it is stored with the weights.

        `frequencies` (M,) are public or released with DP. Does nothing without Re-Attention.
        """
        self.set_error(
            effective_error(noise_multiplier, expected_batch_size, torch.as_tensor(frequencies), scale=scale)
        )

    def set_error(self, error: EffectiveError) -> None:
        """Set the noise of the parameters for Re-Attention directly."""
        if len(error.items) != self.num_items:
            raise ValueError(f"the effective error has {len(error.items)} items, but the model {self.num_items}")
        if self.reattention:
            self.item_error.copy_(error.items)
            self.weight_error.copy_(error.weights)


class Block(nn.Module):
    """Attention, then feed-forward, each with its residual sum and LayerNorm."""

    def __init__(
        self, attention: SelfAttention, feed_forward: FeedForward, norm: str, dropout: float, branches: int
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward, self.norm = attention, feed_forward, norm
        self.norm1, self.norm2 = nn.LayerNorm(attention.dim), nn.LayerNorm(attention.dim)
        self.dropout = Dropout(dropout)
        self._initialise(branches)

    def _initialise(self, branches: int) -> None:
        """Matrices preserve the size of activations, biases are zero, and each residual branch starts small.

        A branch starts at 1/√branches of its size (as in GPT-2): the state is then mostly the item itself, gradients
        reach the embedding directly, and no user's gradient is wasted on the effects of random layers. Under clipping,
        a user has only a norm of 1 to spend.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for layer in (self.attention.merge, self.feed_forward.contract):
            nn.init.normal_(layer.weight, std=(branches * layer.in_features) ** -0.5)

    def forward(self, x: Tracked, weight_var: Tensor | None, last: bool, maps: Maps | None) -> Tracked:
        """Variances are not propagated past the last attention, where they are no longer needed."""
        w = weight_var
        if self.norm == "pre":
            y = self.attention(track.layer_norm(self.norm1, x, w), w, last, maps)
            x = track.add(x, track.dropout(self.dropout, y))
            y = self.feed_forward(track.layer_norm(self.norm2, x, w), w)
            return track.add(x, track.dropout(self.dropout, y))
        y = self.attention(x, w, last, maps)
        x = track.layer_norm(self.norm1, track.add(x, track.dropout(self.dropout, y)), w)
        y = self.feed_forward(x, w)
        return track.layer_norm(self.norm2, track.add(x, track.dropout(self.dropout, y)), w)


class SelfAttention(nn.Module):
    """softmax(q kᵀ/√d_h) v, each position attending to itself and earlier ones; corrected if variances are known."""

    def __init__(self, dim: int, heads: int, variant: Variant, dropout: float) -> None:
        super().__init__()
        self.dim, self.heads, self.variant, self.dropout = dim, heads, variant, dropout
        self.project = nn.Linear(dim, 3 * dim, bias=False)  # queries, keys, values
        self.merge = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tracked, weight_var: Tensor | None, last: bool, maps: Maps | None) -> Tracked:
        q, k, v = (self._split(t) for t in self.project(x.mean).chunk(3, -1))  # (B, H, L, d_h)
        key_var, value_var = self._variances(x, weight_var, last)
        rate = self.dropout if self.training else 0.0
        need = maps is not None or value_var is not None
        out, weights = attention(
            q, k, v, key_var=key_var, variant=self.variant, dropout=rate, need_weights=need
        )  # (B, H, L, d_h), (B, H, L, L)
        var = None
        if maps is not None and weights is not None:
            maps.append(weights)
        if value_var is not None and weights is not None:
            left, right = value_var
            averaged = Spread(moments.average(weights.detach(), Gaussian(left, left), mean=left).var, right)
            var = self._join(averaged.full() / (1 - rate))
        return track.linear(self.merge, Tracked(self._join(out), var), weight_var)

    def _variances(self, x: Tracked, weight_var: Tensor | None, last: bool) -> tuple[Spread | None, Spread | None]:
        """The variances of keys and values; values only if a later attention needs them."""
        if x.var is None or weight_var is None:
            return None, None
        wanted = 1 if last else 2
        weight = Gaussian(self.project.weight.detach()[self.dim : (1 + wanted) * self.dim], weight_var)
        with torch.no_grad():
            if x.var.shape[-1] == 1:
                spreads = self._even(x, weight)
            else:
                var = moments.linear(x.known(), weight, mean=x.mean).var
                spreads = [Spread(self._split(part)) for part in var.split(self.dim, -1)]
        return spreads[0], None if last else spreads[1]

    def _even(self, x: Tracked, weight: Gaussian) -> list[Spread]:
        """`moments.linear` if all coordinates of an input have the same variance v: v·Σ_j E[W_kj²] + w·Σ_j μ_j²."""
        mean, var = x.known()
        left = torch.cat([var.expand(*mean.shape[:-1], 1), weight.var * mean.square().sum(-1, keepdim=True)], -1)
        heads = left.unsqueeze(1).expand(-1, self.heads, -1, -1)
        squares = (weight.mean.square() + weight.var).sum(-1).view(-1, self.heads, self.dim // self.heads)
        return [Spread(heads, torch.stack([each, torch.ones_like(each)], 1)) for each in squares]

    def _split(self, t: Tensor) -> Tensor:
        """(B, L, d) -> (B, H, L, d_h)"""
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _join(self, t: Tensor) -> Tensor:
        """(B, H, L, d_h) -> (B, L, d)"""
        return t.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """The same two-layer network at every position: activation(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, dim: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.expand, self.contract, self.activation = nn.Linear(dim, hidden), nn.Linear(hidden, dim), activation

    def forward(self, x: Tracked, weight_var: Tensor | None) -> Tracked:
        return track.feed_forward(self.expand, self.activation, self.contract, x, weight_var)


def _check(dim: int, heads: int, blocks: int, norm: str, activation: str, reattention: bool | str) -> None:
    if heads < 1 or dim % heads:
        raise ValueError(f"heads is {heads}; it must divide dim, which is {dim}")
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}; it must be 1 or more")
    if norm not in ("post", "pre"):
        raise ValueError(f"norm is {norm!r}; it must be 'post' or 'pre'")
    if activation not in track.ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(track.ACTIVATIONS)}")
    if reattention not in (False, True, "renormalised", "literal"):
        raise ValueError(f"reattention is {reattention!r}; it must be False, True, 'renormalised' or 'literal'")
