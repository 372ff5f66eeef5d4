"""Re-Attention: softmax attention with the inflation by noisy keys taken out (paper, 4.2 and 4.3.3; errata 14, 17).

For a query q and a key k ~ N(k̄, V) the score s = ⟨q,k⟩/√d_h is Gaussian with variance Σ_c q_c² V_c / d_h, and
E[exp s] = exp(E s)·exp(Var s / 2): noisy keys draw more attention than they deserve. Re-Attention takes the factor out.

    renormalised   S_ij ∝ exp(s_ij − Var[s_ij]/2), rows sum to one
    literal        S_ij = softmax(s)_ij · exp(−Var[s_ij]/2), as printed; rows sum to less than one

Shapes: q, k, v, key_var are (B, H, L, d_h), head after batch, key_mask is (B, L) with True where a key is real.
The variance never carries a gradient; q does, through Var[s]. Nothing here mixes users.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Variant = Literal["renormalised", "literal"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_var: Tensor | None = None,
    variant: Variant = "renormalised",
    causal: bool = True,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Σ_j S_ij v_j with the noise in the keys corrected for; without any, plain attention bit for bit.

    `dropout` is the rate on S; pass 0 outside training.
    """
    if key_var is not None and _is_zero(key_var):
        key_var = None
    if key_var is not None and _checked(variant) == "literal":
        weights = attention_weights(q, k, key_var=key_var, variant=variant, causal=causal, key_mask=key_mask)
        return F.dropout(weights, dropout) @ v
    scale = 1 / math.sqrt(q.shape[-1])
    if key_var is not None:
        q, k = widen(q, k, key_var)
    mask = None if key_mask is None else _allowed(q, k, causal, key_mask)
    causal = causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale)


def widen(q: Tensor, k: Tensor, key_var: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of twice the width whose plain scores are the corrected ones: no extra L×L tensor.

    ⟨q,k⟩/√d_h − Σ_c q_c² V_c/(2 d_h) = ⟨[q, −q²/(2√d_h)], [k, V]⟩/√d_h
    """
    half = -0.5 / math.sqrt(q.shape[-1])
    return torch.cat([q, half * q.square()], -1), torch.cat([k, key_var.detach()], -1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    key_var: Tensor | None = None,
    variant: Variant = "renormalised",
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The attention map S itself, (B, H, L, L), without dropout: for plots, the literal variant, and `average`."""
    scale = 1 / math.sqrt(q.shape[-1])
    correction = None
    if key_var is not None and _checked(variant) == "renormalised":
        q, k = widen(q, k, key_var)
    elif key_var is not None:
        correction = torch.exp((-0.5 * scale**2) * (q.square() @ key_var.detach().mT))
    scores = (q * scale) @ k.mT
    allowed = _allowed(q, k, causal, key_mask)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = torch.softmax(scores, -1)
    if key_mask is not None:  # a row without any key: softmax of nothing, zero as SDPA has it
        weights = weights.nan_to_num(0.0)
    return weights if correction is None else weights * correction


def _allowed(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor | None:
    """True where query i may look at key j, broadcasting to (B, H, L, L); None where everything is allowed."""
    allowed = None
    if causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if key_mask is not None:
        real = key_mask[:, None, None, :]
        allowed = real if allowed is None else real & allowed
    return allowed


def _checked(variant: str) -> str:
    if variant not in ("renormalised", "literal"):
        raise ValueError(f"variant is {variant!r}; it must be 'renormalised' or 'literal'")
    return variant


def _is_zero(key_var: Tensor) -> bool:
    """Whether there is nothing to correct; an export cannot branch on values and keeps the correction."""
    return not torch.compiler.is_compiling() and not bool(key_var.any())
