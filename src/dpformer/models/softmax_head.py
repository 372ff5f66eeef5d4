"""The softmax head: hidden states and item embeddings in, one loss per user out.

    loss_b = Σ_u w_bu · (log Σ_m exp(⟨h_bu, E_m⟩ + β_m) − ⟨h_bu, E_y⟩ − β_y),     Σ_u w_bu = 1

The residual r_u = softmax(h_u Eᵀ + β) − onehot(y_u) is all that the backward pass needs: ∂loss_b/∂h_u = w_u r_u E and
∂loss_b/∂E = Σ_u w_u r_u ⊗ h_u. Only positions with a target are computed, in tiles of rows, and residuals are kept only
while they fit `KEEP` numbers: beyond that they are computed again, so that neither
positions × items nor users × items × d numbers ever exist at once.

With `row_scale` s the table is s_m·E_m, row by row, and E is what is trained: logits are s_m⟨h_bu, E_m⟩ + β_m, and a
residual is multiplied by s once. ∂loss_b/∂h_u = w_u (r_u s) E and ∂loss_b/∂E = Σ_u w_u (r_u s) ⊗ h_u as before.

To the clipping engine it is a linear use whose left side, the residuals, is made in tiles: its rule is at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from dpformer.clipping.interception import Interception
from dpformer.clipping.recording import RULES, Recorder, UserRows, rule
from dpformer.clipping.rules.one_user import of_users, user_rule, wrapped
from dpformer.clipping.uses import Ragged
from dpformer.compat import Outside, physical
from dpformer.errors import CannotBatch, UnsupportedUse

TILE = 1 << 20  # numbers of one tile of logits: 4 MB of float32, about a core's share of the cache
_TINY = 1e-30  # float32 has few digits left below this
KEEP = 1 << 26  # residuals are kept up to this many numbers (256 MB of float32)


def softmax_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    position_weights: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of each user's positions, shape (B,); 0 for a user without a target.

    Args:
        hidden: (B, L, d) states that predict.
        weight: (M, d) one row per item, usually the shared embedding.
        targets: (B, L) int64, the item to predict at each position; −1 where there is nothing to predict.
        bias: (M,) added to the logits.
        position_weights: (B, L) positive, how much each position counts; by default all alike. Their sum over a user's
            positions with a target is divided out. A user's weights may depend on that user's own data only.
        row_scale: (M,) positive and public: row m of the table is row_scale[m]·weight[m]. Not with a trained bias.
    """
    if has_torch_function((hidden, weight, targets)):
        args = (hidden, weight, targets)
        more: dict[str, Any] = {"bias": bias, "position_weights": position_weights, "row_scale": row_scale}
        return handle_torch_function(softmax_loss, args, *args, **more)
    rows = HeadRows.of(hidden, weight, targets, bias, position_weights, row_scale)
    return _SoftmaxLoss.apply(hidden, weight, bias, rows)


@dataclass
class HeadRows:
    """The positions that have a target, packed user by user, with what their residuals need."""

    valid: Tensor  # (B, L) bool
    hidden: Tensor  # (N, d)
    weight: Tensor  # (M, d)
    bias: Tensor | None  # (M,)
    target: Tensor  # (N,)
    user: Tensor  # (N,) the user of each row, ascending
    loss_weight: Tensor  # (N,) adds up to 1 for each user
    kept: Tensor | None  # (N, M) residuals, if they fit
    row_scale: Tensor | None = None  # (M,)
    scaled: Tensor | None = None  # (M, d) the table of the logits, where it is not `weight`

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        position_weights: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> HeadRows:
        _check(hidden, weight, targets, bias, position_weights)
        _check_scale(weight, bias, row_scale)
        valid = targets >= 0
        counts = valid.sum(1)
        user = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        # Half precision is for matrices of the encoder: a softmax over a vocabulary is summed in float32.
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        rows = hidden.detach()[valid].to(dtype)
        loss_weight = (1.0 / counts.to(dtype))[user]
        if position_weights is not None:
            weights = position_weights.detach().to(dtype).where(valid, 0)
            loss_weight = (weights / weights.sum(1, keepdim=True))[valid]
        fixed = None if bias is None else bias.detach().to(dtype)
        table = weight.detach().to(dtype)
        made = HeadRows(valid, rows, table, fixed, targets[valid], user, loss_weight, None)
        if row_scale is not None:
            made.row_scale = row_scale.detach().to(dtype)
            made.scaled = table * made.row_scale[:, None]
        return made

    def losses(self) -> Tensor:
        """(B,) the losses; residuals are kept on the way if they fit."""
        n, items = len(self.hidden), len(self.weight)
        if n * items <= KEEP:
            self.kept = self.hidden.new_empty(n, items)
        tile = self.hidden.new_empty(min(n, self.tile_rows), items) if self.kept is None else self.kept
        out = self.hidden.new_zeros(len(self.valid))
        for a, b in self.tiles():
            logits = self._logits(slice(a, b), tile[: b - a] if self.kept is None else tile[a:b])
            each = self._to_residual(logits, slice(a, b))
            out.index_add_(0, self.user[a:b], each * self.loss_weight[a:b])
        return out

    @property
    def tile_rows(self) -> int:
        return max(32, TILE // max(1, len(self.weight)))  # fewer rows would read the table more than compute with it

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows whose logits fit a tile."""
        n = len(self.hidden)
        return ((a, min(a + self.tile_rows, n)) for a in range(0, n, self.tile_rows))

    def residuals(self) -> Iterator[tuple[slice, Tensor]]:
        """All residuals: at once if they were kept, else tile by tile."""
        if self.kept is not None:
            yield slice(0, len(self.hidden)), self.kept
            return
        for a, b in self.tiles():
            yield slice(a, b), self.residual(slice(a, b))

    def residual(self, rows: slice) -> Tensor:
        """(n, M): softmax − onehot of some rows, times `row_scale`; kept or computed again. Without the loss weight."""
        if self.kept is not None:
            return self.kept[rows]
        logits = self._logits(rows, None)
        self._to_residual(logits, rows)
        return logits

    def to_hidden(self, scale: Tensor) -> Tensor:
        """(N, d): scale_u r_u E."""
        out = torch.empty_like(self.hidden)
        for rows, r in self.residuals():
            torch.mm(r, self.weight, out=out[rows])
        return out.mul_(scale[:, None])

    def add_to_weight(self, scale: Tensor, out: Tensor) -> Tensor:
        """(M, d): out += Σ_u scale_u r_u ⊗ h_u."""
        scaled = self.hidden * scale[:, None]
        for rows, r in self.residuals():
            out.addmm_(r.mT, scaled[rows])
        return out

    def add_to_bias(self, scale: Tensor, out: Tensor) -> Tensor:
        """(M,): out += Σ_u scale_u r_u."""
        for rows, r in self.residuals():
            out.addmv_(r.mT, scale[rows])
        return out

    def _logits(self, rows: slice | Tensor, out: Tensor | None) -> Tensor:
        table = self.weight if self.scaled is None else self.scaled
        logits = torch.mm(self.hidden[rows], table.mT, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def _to_residual(self, logits: Tensor, rows: slice) -> Tensor:
        """Logits become softmax − onehot in place; returns the cross-entropy of each row."""
        target = self.target[rows, None]
        torch.softmax(logits, 1, out=logits)  # one row at a time, in place: a row stays in the first cache
        picked = logits.gather(1, target)
        logits.scatter_add_(1, target, torch.full_like(picked, -1.0))
        loss = -picked[:, 0].log()
        if bool((picked < _TINY).any()):  # an underflow is not a loss of infinity
            some = (picked[:, 0] < _TINY).nonzero()[:, 0]
            again = self._logits(some + rows.start, None)
            loss[some] = again.logsumexp(1) - again.gather(1, target[some])[:, 0]
        if self.row_scale is not None:
            logits.mul_(self.row_scale)
        return loss

    def longest(self, residual: Tensor, rows: slice) -> Tensor:
        """(n,) what some rows of residuals are long at most."""
        target = self.target[rows]
        if self.row_scale is None:
            return longest(residual, target)
        own, most = self.row_scale[target], self.row_scale.max()
        missed = residual.gather(1, target[:, None])[:, 0].abs() / own
        return _longest(missed, residual, own, most)


class _SoftmaxLoss(torch.autograd.Function):
    """The head as one autograd node; gradients come from the residuals."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: HeadRows) -> Tensor:
        ctx.rows, ctx.dtypes = rows, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return rows.losses()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        scale = grads[0][rows.user] * rows.loss_weight
        to_hidden = to_weight = to_bias = None
        of_hidden, of_weight, of_bias = ctx.dtypes
        if ctx.needs_input_grad[0]:
            to_hidden = rows.hidden.new_zeros(*rows.valid.shape, rows.hidden.shape[1], dtype=of_hidden)
            to_hidden[rows.valid] = rows.to_hidden(scale).to(of_hidden)
        if ctx.needs_input_grad[1]:
            to_weight = rows.add_to_weight(scale, torch.zeros_like(rows.weight)).to(of_weight)
        if ctx.needs_input_grad[2]:
            to_bias = rows.add_to_bias(scale, torch.zeros_like(rows.bias)).to(of_bias)
        return to_hidden, to_weight, to_bias, None


def longest(residual: Tensor, target: Tensor) -> Tensor:
    """(n,) what rows of residuals p − onehot(y) are long at most: reading all of them would cost as much as a norm.

        ‖p − onehot(y)‖² = (1 − p_y)² + Σ_{j≠y} p_j² ≤ (1 − p_y)² + (Σ_{j≠y} p_j)² ,   Σ_{j≠y} p_j ≤ 1 − p_y + M·u

    as computed: the sum of M exponentials, by which all were divided, was rounded M times. √2 too long at most.
    """
    return _longest(residual.gather(1, target[:, None])[:, 0].abs(), residual)


def _longest(missed: Tensor, residual: Tensor, own: Tensor | float = 1.0, most: Tensor | float = 1.0) -> Tensor:
    """The bound from 1 − p_y (n,), where p_y is multiplied by `own` and no other p_j by more than `most`."""
    u = torch.finfo(residual.dtype).eps / 2
    return torch.hypot(own * missed, most * (missed + 1.01 * (residual.shape[1] + 8) * u))


@dataclass
class HeadUse:
    """The use of the embedding (or of the bias) by the head: written out for a few users at a time."""

    rows: HeadRows
    grad: Tensor  # (B,) ∂(what is differentiated)/∂loss_b
    of_bias: bool

    def __post_init__(self) -> None:
        self.counts = torch.bincount(self.rows.user, minlength=len(self.rows.valid)).tolist()
        self.starts = [0, *itertools.accumulate(self.counts)]
        self.scale = self.grad[self.rows.user] * self.rows.loss_weight  # (N,)

    @property
    def shape(self) -> tuple[int, ...]:
        weight = self.rows.weight
        return (len(weight),) if self.of_bias else tuple(weight.shape)

    @property
    def numbers_each(self) -> int:
        """Numbers that `part` makes for one user."""
        return 0 if self.rows.kept is not None else max(self.counts, default=0) * len(self.rows.weight)

    def part(self, a: int, b: int) -> Ragged:
        rows = slice(self.starts[a], self.starts[b])
        scale = self.scale[rows, None]
        right = scale if self.of_bias else self.rows.hidden[rows] * scale
        residual = self.rows.residual(rows)
        return Ragged(residual, right, self.counts[a:b], self.shape, self.rows.longest(residual, rows))

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        scale = self.scale * c[self.rows.user]
        if self.of_bias:
            self.rows.add_to_bias(scale, out)
        else:
            self.rows.add_to_weight(scale, out)

    def keep(self, users: Tensor) -> None:
        """Forgets users: hidden rows of zero have finite residuals, and a scale of zero drops them."""
        gone = ~users[self.rows.user]
        self.scale = self.scale.masked_fill(gone, 0)
        self.rows.hidden = self.rows.hidden.masked_fill(gone[:, None], 0)
        if self.rows.kept is not None:
            self.rows.kept.masked_fill_(gone[:, None], 0)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, position_weights: Tensor | None
) -> None:
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"softmax_loss needs hidden (B, L, d) and weight (M, d), "
            f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:2] or targets.dtype != torch.int64:
        raise ValueError(
            f"softmax_loss needs int64 targets of shape {tuple(hidden.shape[:2])}, "
            f"got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"softmax_loss needs a bias of shape ({len(weight)},), got {tuple(bias.shape)}")
    if position_weights is not None and position_weights.requires_grad:
        raise ValueError("softmax_loss needs position weights that are not trained: give it .detach() of them")
    if position_weights is not None and position_weights.shape != targets.shape:
        raise ValueError(
            f"softmax_loss needs position weights of shape {tuple(targets.shape)}, got {tuple(position_weights.shape)}"
        )
    if position_weights is not None and not bool(_counts(position_weights[targets >= 0]).all()):
        raise ValueError("softmax_loss needs finite position weights above 0 wherever there is a target")
    if targets.numel() and int(targets.max()) >= len(weight):
        raise ValueError(f"target {int(targets.max())} is outside the {len(weight)} items (−1 means no target)")


def _check_scale(weight: Tensor, bias: Tensor | None, row_scale: Tensor | None) -> None:
    if row_scale is None:
        return
    if row_scale.shape != weight.shape[:1] or not bool(_counts(row_scale).all()):
        raise ValueError(
            f"softmax_loss needs a row scale of shape ({len(weight)},), finite and above 0, "
            f"got {tuple(row_scale.shape)} from {float(row_scale.min()):g} to {float(row_scale.max()):g}"
        )
    if row_scale.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("softmax_loss scales rows by what is not trained, and without a trained bias: give .detach()")


def _counts(weights: Tensor) -> Tensor:
    """In float32, in which they may be summed."""
    weights = weights.to(torch.float32)
    return (weights > 0) & weights.isfinite()


# -- the rule ----------------------------------------------------------------------------------------------------------


AT_ONCE = 1 << 24  # logits in the self-check


@rule(softmax_loss)
def softmax_head(
    gate: Recorder,
    func: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    position_weights: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """One loss per user."""
    managed = [p for p in (weight, bias) if gate.is_managed(p)]
    if gate.is_managed(hidden) or gate.is_public(targets):
        raise gate.refusal(managed[0], func, "give it hidden states and targets of users")
    if row_scale is not None and not gate.is_public(row_scale):
        raise gate.refusal(managed[0], func, "scale rows by a buffer of the model, the same for all users")
    positions = HeadRows.of(hidden, weight, targets, bias, position_weights, row_scale)
    source = hidden.detach()

    def replay(asked: Tensor, *fresh: Tensor) -> Tensor:
        """What anyone would write, all logits and then cross-entropy, for the users that are asked for."""
        w, b = gate.fill(fresh, weight, bias)
        w = w if row_scale is None else w * row_scale[:, None].to(w.dtype)
        logits, wanted = F.linear(source[asked].to(w.dtype), w, b), targets[asked]
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="none")
        counted = (wanted >= 0).to(each.dtype)
        if position_weights is not None:
            counted = position_weights[asked].to(each.dtype).where(wanted >= 0, 0)
        total = counted.sum(1)
        return (each.reshape(wanted.shape) * counted).sum(1) / total.where(total > 0, 1)

    def part(asked: Tensor, grad: Tensor, *fresh: Tensor) -> Tensor:
        return (replay(asked, *fresh) * grad[asked]).sum()

    def paired(grad: Tensor, *fresh: Tensor) -> Tensor:
        """Of all users, a few at a time: their logits are made again in the backward pass, never all at once."""
        few = max(1, AT_ONCE // max(1, hidden.shape[1] * len(weight)))
        parts = (
            checkpoint(part, asked, grad, *fresh, use_reentrant=False, preserve_rng_state=False)
            for asked in grad.nonzero()[:, 0].split(few)
        )
        return sum(parts, grad.new_zeros(()))

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        uses: list[tuple[Tensor, Any]] = []
        if gate.is_managed(weight):
            uses.append((weight, HeadUse(positions, grad, of_bias=False)))
        if gate.is_managed(bias):
            uses.append((bias, HeadUse(positions, grad, of_bias=True)))
        return uses

    out = _SoftmaxLoss.apply(hidden, gate.cut(weight), gate.cut(bias), positions)
    return gate.record(func, managed, paired, build, out, rows=hidden)


@user_rule(softmax_loss, without_parameters=True)
def head(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """dpformer's own head: hidden (B, 1, L, d) → losses (B, 1)."""
    hidden, weight, targets = args
    weights, public = kwargs.get("position_weights"), (weight, kwargs.get("bias"), kwargs.get("row_scale"))
    if any(of_users(t) for t in public):
        raise UnsupportedUse("softmax_loss is given a table or a bias that is a user's own: use F.cross_entropy")
    if not (of_users(hidden) and of_users(targets)) or hidden.shape[0] != 1:
        raise CannotBatch("softmax_loss takes a user's hidden states (1, L, d) and targets (1, L)")
    if weights is not None:
        with gate:
            weights = weights * torch.ones_like(targets)
    with Outside():
        given = {**kwargs, "position_weights": None if weights is None else physical(weights).squeeze(1)}
        rows = physical(hidden).squeeze(1), weight, physical(targets).squeeze(1)
        trained = any(gate.is_managed(t) for t in public)
        return wrapped(gate, (RULES[func](gate, func, rows, given) if trained else func(*rows, **given)).unsqueeze(1))
