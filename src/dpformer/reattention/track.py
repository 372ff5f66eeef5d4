"""A network's layers, each run as usual and, beside it, the variance of its output.

A model written with these functions is an ordinary one when nothing is tracked (`var` is None), and carries the DP
noise of its own parameters otherwise. The mean is the network's own activation, gradient and all; the variance is a
function of detached numbers, so it carries no gradient and per-user gradient norms stay exact. Parameters are detached
*before* gradients are switched off: a use of a trainable parameter under `no_grad` is refused by Phantom Clipping.

`weight_var` is the variance of every parameter but the embedding rows, one number (the squared effective error).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer.reattention import activations, moments
from dpformer.reattention.moments import Gaussian


class Tracked(NamedTuple):
    """An activation and the variance of its DP noise; None where nobody asks for it."""

    mean: Tensor  # (B, L, n), with gradient
    var: Tensor | None  # broadcasts against mean, without gradient

    def known(self) -> Gaussian:
        """Both as detached numbers, for the rules in `moments`."""
        assert self.var is not None
        return Gaussian(self.mean.detach(), self.var)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Gaussian]]] = {
    "relu": (F.relu, activations.relu),
    "gelu": (F.gelu, activations.gelu),
}


def linear(layer: nn.Linear, x: Tracked, weight_var: Tensor | None) -> Tracked:
    mean = layer(x.mean)
    if x.var is None or weight_var is None:
        return Tracked(mean, None)
    weight = Gaussian(layer.weight.detach(), weight_var)
    bias = None if layer.bias is None else Gaussian(layer.bias.detach(), weight_var)
    with torch.no_grad():
        return Tracked(mean, moments.linear(x.known(), weight, bias, mean=mean).var)


def layer_norm(layer: nn.LayerNorm, x: Tracked, weight_var: Tensor | None) -> Tracked:
    mean = layer(x.mean)
    if x.var is None or weight_var is None:
        return Tracked(mean, None)
    weight, bias = (Gaussian(p.detach(), weight_var) for p in (layer.weight, layer.bias))
    with torch.no_grad():
        return Tracked(mean, moments.layer_norm(x.known(), weight, bias, layer.eps, mean=mean).var)


def activation(name: str, x: Tracked) -> Tracked:
    function, rule = ACTIVATIONS[name]
    mean = function(x.mean)
    if x.var is None:
        return Tracked(mean, None)
    with torch.no_grad():
        return Tracked(mean, rule(x.known(), mean=mean).var)


def add(x: Tracked, y: Tracked) -> Tracked:
    var = None if x.var is None or y.var is None else x.var + y.var
    return Tracked(x.mean + y.mean, var)


def dropout(layer: nn.Dropout, x: Tracked) -> Tracked:
    """Dropout; the variance is that of the DP noise averaged over masks (`moments.dropout`, its first part)."""
    var = x.var / (1 - layer.p) if x.var is not None and layer.training else x.var
    return Tracked(layer(x.mean), var)
