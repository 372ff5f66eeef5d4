"""Re-Attention: softmax attention without the inflation by noisy keys (paper, 4.2 and 4.3.3).

For a query q and a key k ~ N(k̄, V) the score s = ⟨q,k⟩/√d_h is Gaussian with variance Σ_c q_c² V_c / d_h, and
E[exp s] = exp(E s)·exp(Var s / 2): noisy keys draw too much attention. Re-Attention removes the factor.

    renormalised   S_ij ∝ exp(s_ij − Var[s_ij]/2), rows sum to one
    literal        S_ij = softmax(s)_ij · exp(−Var[s_ij]/2), as printed; rows sum to less than one

Shapes: q, k, v, key_var are (B, H, L, d_h), head after batch, key_mask is (B, L) with True where a key is real.
The variance carries no gradient; q does, through Var[s]. Nothing here mixes users.

Plain attention is PyTorch's fused kernel. The corrected one computes the map explicitly. It equals plain attention in a
space of twice the width, [q, −q²/(2√d_h)] against [k, V]; but at L = 200, d_h = 64 on a CPU two products added into one
map take 1.3 times as long as fused plain attention, forward and backward, the wide space 1.7 times; and `average` needs
the map.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.functions import on_all_users
from dpformer.reattention.recording import recording

Variant = Literal["renormalised", "literal"]


class Spread(NamedTuple):
    """A variance of shape (B, H, L, d_h): left @ right, or left alone.

    If all coordinates of an input are equally noisy, as in the first block, it is v_j·S_c + u_j: two columns of `left`
    represent all of it, and products with the map cost almost nothing.
    """

    left: Tensor  # (B, H, L, r)
    right: Tensor | None = None  # (H, r, d_h)

    def full(self) -> Tensor:
        return self.left if self.right is None else self.left @ self.right


@on_all_users
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_var: Tensor | Spread | None = None,
    variant: Variant = "renormalised",
    causal: bool = True,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Σ_j S_ij v_j corrected for the noise in the keys, and S on request; without noise, exactly plain attention.

    `dropout` is the rate on S (pass 0 outside training); the returned S excludes it.
    """
    corrected = key_var is not None and not _no_noise(key_var)
    weights = None
    if corrected or need_weights:
        var = key_var if corrected else None
        weights = attention_weights(q, k, key_var=var, variant=variant, causal=causal, key_mask=key_mask)
    if corrected and weights is not None:
        return F.dropout(weights, dropout) @ v, weights if need_weights else None
    mask = None if key_mask is None else _allowed(q, k, causal, key_mask)
    causal = causal and mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    return out, weights


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    key_var: Tensor | Spread | None = None,
    variant: Variant = "renormalised",
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The attention map S itself, (B, H, L, L), row = query, without dropout."""
    if variant not in ("renormalised", "literal"):
        raise ValueError(f"variant is {variant!r}; it must be 'renormalised' or 'literal'")
    allowed = _allowed(q, k, causal, key_mask)
    correction = None if key_var is None else _correction(q, key_var)
    scores = _added(_bias(q, allowed), q * (1 / math.sqrt(q.shape[-1])), k)
    if correction is not None and variant == "renormalised":
        scores = _added(scores, *correction)
    weights = torch.softmax(scores, -1)
    if correction is not None and variant == "literal":
        weights = weights * torch.exp(correction[0] @ correction[1].mT)
    if key_mask is not None and allowed is not None:
        weights = weights * allowed.any(-1, keepdim=True)  # a row without any key is zero, as in PyTorch
    return weights


def _correction(q: Tensor, key_var: Tensor | Spread) -> tuple[Tensor, Tensor]:
    """Two factors of −Var[s]/2, (B, H, L, r) each."""
    left, right = key_var if isinstance(key_var, Spread) else Spread(key_var)
    half = q.square() * (-0.5 / q.shape[-1])
    return half if right is None else half @ right.mT, left.detach()


def _no_noise(key_var: Tensor | Spread) -> bool:
    """Whether there is nothing to correct. An export cannot branch on values, so it keeps the correction."""
    left = key_var.left if isinstance(key_var, Spread) else key_var
    return not recording() and not bool(left.any())


def _allowed(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor | None:
    """True where query i may attend to key j, broadcasting to (B, H, L, L); None if all may."""
    allowed = None
    if causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if key_mask is not None:
        real = key_mask[:, None, None, :]
        allowed = real if allowed is None else real & allowed
    return allowed


def _bias(q: Tensor, allowed: Tensor | None) -> Tensor:
    """The summand of a score: zero, or so negative that its exponential is zero (finite, so no ∞ − ∞ occurs)."""
    if allowed is None:
        return q.new_zeros(())
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min / 2)


def _added(scores: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """scores + a bᵀ in one pass; scores broadcasts to (B, H, L, L)."""
    shape = (*a.shape[:-1], b.shape[-2])
    if scores.ndim > 2:
        scores = scores.expand(shape).flatten(0, 1)
    return torch.baddbmm(scores, a.flatten(0, 1), b.flatten(0, 1).mT).view(shape)
