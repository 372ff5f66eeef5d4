"""Re-Attention inside Hugging Face's GPT-2, through its `AttentionInterface`; class and weights are unchanged.

Each block computes  x ← x + attention(ln_1(x));  x ← x + mlp(ln_2(x)).  Alongside, the variance of the DP noise of x,
one number per activation, is propagated by the rules of `moments`:

    wte, wpe           Var = σ_eff(token)² + σ_eff²                 one number per position
    ln_1, ln_2         `layer_norm`
    c_attn             `linear`: the variance of the keys corrects the scores, s_ij − Var[s_ij]/2
    the average        `average`: Σ_j S_ij² Var[v_j]
    c_proj, mlp        `linear`, `gelu` or `relu`
    residual sums      variances add

Approximations, in addition to those of the rules themselves: activations are treated as independent; GPT-2's tanh form
of GELU is treated as GELU (they differ by at most 0.0005 in value); a frozen parameter has no noise, so with a frozen
embedding all tokens are alike; variances do not enter a key-value cache, so pass `use_cache=False`. They stop after the
last attention, where they are no longer needed.

Variances are functions of detached numbers and carry no gradient; queries do, through Var[s]. So none of it is a use
of a parameter, nothing mixes users, and per-user norms stay exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer.reattention import activations, moments
from dpformer.reattention.attention import Variant
from dpformer.reattention.error import effective_error
from dpformer.reattention.moments import Gaussian

NAME = "dpformer_reattention"
_ACTIVATIONS = {
    "gelu": activations.gelu,
    "gelu_new": activations.gelu,
    "gelu_pytorch_tanh": activations.gelu,
    "relu": activations.relu,
}


def use_reattention(
    model: nn.Module,
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    frequencies: Tensor,
    scale: float = 1.0,
    variant: Variant = "renormalised",
) -> None:
    """Switch a GPT-2 to Re-Attention; calling it again replaces the settings.

    Args:
        model: `GPT2Model`, or one with a head, such as `GPT2LMHeadModel`.
        noise_multiplier: σ of the training.
        expected_batch_size: B.
        frequencies: (vocabulary,) the share of users who have each token, public or released with DP.
        scale: scale of the effective error (`effective_error`).
        variant: rows sum to one, or as printed in the paper (`attention`).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    body = _gpt2_of(model)
    if variant not in ("renormalised", "literal"):
        raise ValueError(f"variant is {variant!r}; it must be 'renormalised' or 'literal'")
    error = effective_error(noise_multiplier, expected_batch_size, torch.as_tensor(frequencies), scale=scale)
    if len(error.items) != len(body.wte.weight):
        raise ValueError(f"frequencies has {len(error.items)} tokens, but the model {len(body.wte.weight)}")
    AttentionInterface.register(NAME, corrected_attention)
    AttentionMaskInterface.register(NAME, eager_mask)  # masked positions get a large negative number
    if "noise" not in body._modules:
        body.add_module("noise", NoiseOfGPT2(body))
    body.noise.set(error.items, error.weights, variant)
    model.set_attn_implementation(NAME)  # type: ignore[operator]


class NoiseOfGPT2(nn.Module):
    """The variance of the activations while the model runs. Layers report to it through forward hooks."""

    item_var: Tensor  # (vocabulary,)
    weight_var: Tensor  # ()

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.register_buffer("item_var", torch.zeros(len(body.wte.weight)), persistent=False)
        self.register_buffer("weight_var", torch.zeros(()), persistent=False)
        self.variant: Variant = "renormalised"
        self.stream: Tensor | None = None  # variance of x, the residual stream
        self.inner: Tensor | None = None  # variance inside the current branch
        self.normed: Tensor | None = None  # the input of the branch: the mean of c_attn's input
        self._positions = [body.wpe]  # in a list: no child module, no cycle
        body.wte.register_forward_hook(self._tokens)
        body.drop.register_forward_hook(self._dropped)
        for number, block in enumerate(body.h):
            for layer, report in self._reports(block):
                layer.register_forward_hook(report)
            block.attn.noise = [self, number == len(body.h) - 1]

    def _reports(self, block: Any) -> list[tuple[nn.Module, Any]]:
        return [
            (block.ln_1, self._normed),
            (block.attn.c_proj, self._linear),
            (block.attn.resid_dropout, self._added),
            (block.ln_2, self._normed),
            (block.mlp.c_fc, self._linear),
            (block.mlp.act, self._activated(block.attn.config.activation_function)),
            (block.mlp.c_proj, self._linear),
            (block.mlp.dropout, self._added),
        ]

    def set(self, items: Tensor, weights: Tensor, variant: Variant) -> None:
        self.item_var.copy_(items.square())
        self.weight_var.copy_(weights.square())
        self.variant = variant

    def var_of(self, parameter: Tensor) -> Tensor:
        """The variance of a parameter: only trained parameters have noise."""
        return self.weight_var if parameter.requires_grad else torch.zeros_like(self.weight_var)

    # Reports, in order of execution; `x` and `out` are the layer's input and output.

    def _tokens(self, layer: Any, x: tuple[Tensor], out: Tensor) -> None:
        own = F.embedding(x[0], self.item_var[:, None]) if layer.weight.requires_grad else 0 * out.detach()[..., :1]
        self.stream, self.inner = (own + self.var_of(self._positions[0].weight)).to(out.dtype), None

    def _dropped(self, layer: nn.Dropout, x: tuple[Tensor], out: Tensor) -> None:
        self.stream = self._through(layer, self.stream)

    def _normed(self, layer: Any, x: tuple[Tensor], out: Tensor) -> None:
        if self.stream is None:  # after the last attention
            return
        self.normed = out.detach()
        weight, bias = (Gaussian(p.detach(), self.var_of(p)) for p in (layer.weight, layer.bias))
        with torch.no_grad():
            self.inner = moments.layer_norm(Gaussian(x[0].detach(), self.stream), weight, bias, layer.eps).var

    def _linear(self, layer: Any, x: tuple[Tensor], out: Tensor) -> None:
        if self.inner is not None:
            self.inner = self.linear(layer, x[0], self.inner, slice(None))

    def linear(self, layer: Any, x: Tensor, var: Tensor, columns: slice) -> Tensor:
        """Var[x W + b] for some columns of a Hugging Face Conv1D, whose weight is (in, out)."""
        weight, bias = layer.weight.detach()[:, columns].mT, layer.bias.detach()[columns]
        of_weight, of_bias = Gaussian(weight, self.var_of(layer.weight)), Gaussian(bias, self.var_of(layer.bias))
        with torch.no_grad():
            return moments.linear(Gaussian(x.detach(), var), of_weight, of_bias, mean=x.detach()).var

    def _activated(self, name: str) -> Any:
        rule = _ACTIVATIONS[name]

        def report(layer: nn.Module, x: tuple[Tensor], out: Tensor) -> None:
            if self.inner is not None:
                with torch.no_grad():
                    self.inner = rule(Gaussian(x[0].detach(), self.inner), mean=out.detach()).var

        return report

    def _added(self, layer: nn.Dropout, x: tuple[Tensor], out: Tensor) -> None:
        """The end of a branch: its variance is added to the stream."""
        branch, self.inner = self._through(layer, self.inner), None
        self.stream = None if self.stream is None or branch is None else self.stream + branch

    @staticmethod
    def _through(layer: nn.Dropout, var: Tensor | None) -> Tensor | None:
        return var / (1 - layer.p) if var is not None and layer.training else var


def corrected_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The function called by `AttentionInterface`: (B, H, L, d_h) each -> (B, L, H, d_h) and the map (B, H, L, L)."""
    noise, last = _noise_of(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.mT * scale
    key_var = _heads_of(noise.linear(module.c_attn, *_input(noise, key), _columns(module, 1)), module)
    correction = (query.square() * (0.5 * scale**2)) @ key_var.mT  # Var[s_ij] / 2
    if noise.variant == "renormalised":
        scores = scores - correction
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, -1).to(value.dtype)
    if noise.variant == "literal":
        weights = weights * torch.exp(-correction)
    noise.inner = None if last else _average_var(module, noise, weights, value, dropout)
    if last:
        noise.stream = None
    out = F.dropout(weights, dropout, module.training) @ value
    return out.transpose(1, 2), weights


def _noise_of(module: Any) -> tuple[NoiseOfGPT2, bool]:
    if not hasattr(module, "noise"):
        raise ValueError(f"{type(module).__name__} is set to {NAME} without settings: call use_reattention(model, …)")
    return module.noise


def _input(noise: NoiseOfGPT2, key: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of c_attn's input."""
    if noise.inner is None or noise.normed is None or noise.inner.shape[1] != key.shape[2]:
        raise ValueError("Re-Attention stores no variances of cached keys: call the model with use_cache=False")
    return noise.normed, noise.inner


def _columns(module: Any, which: int) -> slice:
    """c_attn computes queries (0), keys (1) and values (2) side by side."""
    return slice(which * module.split_size, (which + 1) * module.split_size)


def _heads_of(t: Tensor, module: Any) -> Tensor:
    return t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def _average_var(module: Any, noise: NoiseOfGPT2, weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """(B, L, d): the variance of the attention output, before c_proj."""
    value_var = _heads_of(noise.linear(module.c_attn, *_input(noise, value), _columns(module, 2)), module)
    with torch.no_grad():
        values = Gaussian(value.detach(), value_var)
        var = moments.average(weights.detach(), values, mean=values.mean).var / (1 - dropout)
    return var.transpose(1, 2).flatten(2)


def _gpt2_of(model: nn.Module) -> Any:
    """The GPT2Model in a model, if it consists of supported layers."""
    from transformers import GPT2Model
    from transformers.pytorch_utils import Conv1D

    body = model if isinstance(model, GPT2Model) else getattr(model, "transformer", None)
    if not isinstance(body, GPT2Model):
        raise ValueError(f"Re-Attention supports GPT-2; this is a {type(model).__name__}")
    for name, layer in body.named_modules():
        if name.endswith(("c_attn", "c_proj", "c_fc")) and not isinstance(layer, Conv1D):
            raise ValueError(
                f"Re-Attention supports GPT-2's own layers, but {name} is a {type(layer).__name__}: remove adapters"
            )
    activation = body.config.activation_function
    if activation not in _ACTIVATIONS:
        raise ValueError(f"the activation is {activation!r}; Re-Attention supports {', '.join(_ACTIVATIONS)}")
    if body.config.add_cross_attention:
        raise ValueError("Re-Attention supports causal self-attention, but this GPT-2 has cross-attention")
    return body
