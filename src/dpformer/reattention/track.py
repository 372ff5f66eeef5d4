"""A network's layers, each executed as usual together with the variance of its output.

A model written with these functions is an ordinary one if nothing is tracked (`var` is None), and otherwise propagates
the DP noise of its own parameters. The mean is the network's own activation with its gradient; the variance is a
function of detached values, so it carries no gradient and per-user gradient norms stay exact. Parameters are detached
*before* gradients are switched off: Phantom Clipping refuses uses of trainable parameters under `no_grad`.

`weight_var` is the variance of every parameter except the embedding rows, one number (the squared effective error).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer import compat
from dpformer.clipping.functions import on_all_users
from dpformer.reattention import activations, compiled, moments
from dpformer.reattention.moments import Gaussian
from dpformer.reattention.recording import recording


class Tracked(NamedTuple):
    """An activation and the variance of its DP noise; None if it is not needed."""

    mean: Tensor  # (B, L, n), with gradient
    var: Tensor | None  # broadcasts against mean, without gradient

    def known(self) -> Gaussian:
        """Both detached, for the rules in `moments`."""
        assert self.var is not None
        return Gaussian(self.mean.detach(), self.var)


TILE = 512  # positions per tile

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Gaussian]]] = {
    "relu": (F.relu, activations.relu),
    "gelu": (F.gelu, activations.gelu),
}


def linear(layer: nn.Linear, x: Tracked, weight_var: Tensor | None) -> Tracked:
    mean = layer(x.mean)
    if x.var is None or weight_var is None:
        return Tracked(mean, None)
    return Tracked(mean, _linear_variance(*x.known(), mean.detach(), _linear_rule(layer, weight_var)))


@on_all_users
def _linear_variance(x_mean: Tensor, x_var: Tensor, mean: Tensor, rule: Callable[..., Gaussian]) -> Tensor:
    with torch.no_grad():
        return rule(Gaussian(x_mean, x_var), mean=mean).var


def layer_norm(layer: nn.LayerNorm, x: Tracked, weight_var: Tensor | None) -> Tracked:
    mean = layer(x.mean)
    if x.var is None or weight_var is None:
        return Tracked(mean, None)
    known, (weight, bias) = x.known(), (Gaussian(p.detach(), weight_var) for p in (layer.weight, layer.bias))
    return Tracked(mean, _norm_variance(*known, weight, bias, layer.eps))


@on_all_users
def _norm_variance(mean: Tensor, var: Tensor, weight: Gaussian, bias: Gaussian, eps: float) -> Tensor:
    known = Gaussian(mean, var)
    if compiled.can_read(known):
        return compiled.norm_variance(known, weight.mean, weight.var, eps)
    return _rowwise(lambda m, v: moments.layer_norm(Gaussian(m, v), weight, bias, eps).var, *known)


def feed_forward(
    expand: nn.Linear, activation: str, contract: nn.Linear, x: Tracked, weight_var: Tensor | None
) -> Tracked:
    """contract(activation(expand(x))), position by position; the wide variances in between exist in tiles only."""
    function, activate = ACTIVATIONS[activation]
    inner = expand(x.mean)
    active = function(inner)
    mean = contract(active)
    if x.var is None or weight_var is None:
        return Tracked(mean, None)
    into, out_of = _linear_rule(expand, weight_var), _linear_rule(contract, weight_var)

    def variance(x_mean: Tensor, x_var: Tensor, inner: Tensor, active: Tensor) -> Tensor:
        return out_of(activate(into(Gaussian(x_mean, x_var), mean=inner), mean=active), mean=active).var

    return Tracked(mean, _rowwise(variance, *x.known(), inner.detach(), active.detach()))


def add(x: Tracked, y: Tracked) -> Tracked:
    var = None if x.var is None or y.var is None else x.var + y.var
    return Tracked(x.mean + y.mean, var)


def dropout(layer: nn.Dropout, x: Tracked) -> Tracked:
    """Dropout; the variance is that of the DP noise averaged over masks (`moments.dropout`, its first part)."""
    var = x.var / (1 - layer.p) if x.var is not None and layer.training else x.var
    return Tracked(layer(x.mean), var)


def _linear_rule(layer: nn.Linear, weight_var: Tensor) -> Callable[..., Gaussian]:
    weight = Gaussian(layer.weight.detach(), weight_var)
    bias = None if layer.bias is None else Gaussian(layer.bias.detach(), weight_var)
    return partial(moments.linear, weight=weight, bias=bias)


@on_all_users
def _rowwise(rule: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """rule(*tensors) without gradient, a tile of positions at a time.

    A rule makes a dozen intermediate tensors: tiles keep them in the cache, whereas whole ones cost new memory. All
    tensors here are detached, which spares Phantom Clipping from inspecting the many small ones.
    """
    if recording():  # an export cannot record a loop over positions
        return rule(*tensors)
    with torch.no_grad(), compat.unseen():
        leading = tensors[0].shape[:-1]
        rows = [t.expand(*leading, -1).flatten(0, -2) for t in tensors]
        tiles = [rule(*tile) for tile in zip(*(t.split(TILE) for t in rows), strict=True)]
        return torch.cat(tiles).unflatten(0, leading)
