"""What Re-Attention as printed is made of: one part of it changed, and the rest as it is.

Literal attention is renormalised attention times a gate:

    S_ij = softmax(s)_ij · exp(−Var[s_ij]/2) = r_i · R_ij        r_i = Σ_j softmax(s)_ij · exp(−Var[s_ij]/2)

with R the renormalised rows, and r_i ≤ 1 the sum of row i. So there are four networks, of which the product has three:

                              no gate          gate r_i
    plain rows                vanilla          "gate"         no key is preferred to another
    renormalised rows         renormalised     literal

And others, that share the shrinkage and not where it comes from. A change is a subclass or a function of this module in
the place of the product's, for as long as the context lasts: the product needs no options for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.models import transformer
from dpformer.models.transformer import SelfAttention, Transformer
from dpformer.reattention.attention import attention_weights
from dpformer.reattention.error import EffectiveError
from dpformer.reattention.track import Tracked

# Mean row sum of the literal form in each block, MovieLens-1M at ε = 5: over the real positions of 256 users, and over
# the steps of a run of 60 epochs (seed 0), which begin at (0.97, 0.82) and end at (0.77, 0.93), with (0.84, 0.90) at
# step 93. Of exact data: a constant of an experiment, not private.
MEANS = (0.81, 0.91)


class Constant(SelfAttention):
    """Plain attention times one number a block, which is the same for every user, query and step."""

    def forward(self, x: Tracked, weight_var: Tensor | None, last: bool, maps: list[Tensor] | None) -> Tracked:
        out = super().forward(x, weight_var, last, maps)
        assert out.var is None  # nothing is tracked where nothing is corrected
        return Tracked(MEANS[last] * out.mean, None)  # `merge` has no bias: as if what goes in were smaller


class Learned(Constant):
    """The same with a parameter, one a block, that is clipped and noised as all are; the factor starts at the mean."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: Tracked, weight_var: Tensor | None, last: bool, maps: list[Tensor] | None) -> Tracked:
        return Tracked(self.gate * super().forward(x, weight_var, last, maps).mean, None)


def gate(q: Tensor, k: Tensor, *, key_var: Any = None, variant: str = "literal", **masks: Any) -> Tensor:
    """Plain rows times the sum of the literal row: attention is held back as much, and no key more than another."""
    plain = attention_weights(q, k, **masks)
    if key_var is None:
        return plain
    return plain * attention_weights(q, k, key_var=key_var, variant="literal", **masks).sum(-1, keepdim=True)


SHUFFLE = 39  # seed of the permutation: the same for every run


def shuffled(set_error: Callable[[Any, EffectiveError], None]) -> Callable[[Any, EffectiveError], None]:
    """The errors of other items: as many rare ones as before, and it is others that are taken to be rare."""

    def set_shuffled(model: Any, error: EffectiveError) -> None:
        order = torch.randperm(len(error.items), generator=torch.Generator().manual_seed(SHUFFLE))
        set_error(model, EffectiveError(error.items[order], error.weights))

    return set_shuffled


# name → the row of the tables (`cells.MODELS`) that it changes, what is replaced, and by what
_CHANGES: dict[str, tuple[str, Any, str, Any]] = {
    "gate": ("literal", import_module("dpformer.reattention.attention"), "attention_weights", gate),
    "constant": ("vanilla", transformer, "SelfAttention", Constant),
    "shuffled": ("literal", Transformer, "set_error", shuffled(Transformer.set_error)),
    "learned": ("vanilla", transformer, "SelfAttention", Learned),
}
ABLATIONS = {name: row for name, (row, *_) in _CHANGES.items()}


@contextmanager
def changed(name: str | None) -> Iterator[None]:
    """Networks are built and run with this change; None: as they are."""
    if name is None:
        yield
        return
    if name not in _CHANGES:
        raise ValueError(f"no ablation is called {name!r}; there are {', '.join(_CHANGES)}")
    _, owner, attribute, replacement = _CHANGES[name]
    former = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, former)
