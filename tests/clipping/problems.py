"""One list of model problems, shared by all tests of the clipping engine.

A problem makes a small model and a batch of users' tensors (first dimension: users); the model maps the batch to one
loss a user. Every rule and every way to tie parameters has a problem here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp

V, D, T, B = 11, 6, 5, 4  # vocabulary, width, length, users


@dataclass(frozen=True)
class Problem:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]

    def __repr__(self) -> str:
        return self.name


PROBLEMS: list[Problem] = []


def problem(batch: Callable[[], tuple[Tensor, ...]]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(model: type[nn.Module]) -> type[nn.Module]:
        PROBLEMS.append(Problem(model.__name__, model, batch))
        return model

    return register


def ids(users: int = B, length: int = T) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, V, (users, length)),)


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def padded() -> tuple[Tensor, ...]:
    """Items 1 … V−1 padded with 0 on the right; one user has a single item, one repeats an item."""
    x = torch.randint(1, V, (B, T))
    x[0, 3:] = 0
    x[1, 1:] = 0
    x[2, :] = 3
    return (x,)


def next_token_loss(logits: Tensor, x: Tensor, ignore: int = -100) -> Tensor:
    """One loss per user: the sum over positions of the next-token cross-entropy."""
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none", ignore_index=ignore)
    return each.view_as(x[:, 1:]).sum(1)


def per_user(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1) + y.flatten(1).sin().sum(1)


# -- linear layers ----------------------------------------------------------------------------------------------------


@problem(floats(B, D))
class Linear2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 7), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.b(torch.tanh(self.a(x))))


@problem(floats(B, T, D))
class Linear3d(Linear2d):
    pass


@problem(floats(B, 2, 3, D))
class Linear4d(Linear2d):
    pass


@problem(floats(B, 40, 3))
class LinearLong(nn.Module):
    """Many rows of a small weight: written out is cheaper than Gram."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.relu(self.a(x)))


@problem(floats(B, 2, 40))
class LinearWide(nn.Module):
    """Few rows of a large weight: Gram is cheaper than written out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 50)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.relu(self.a(x)))


@problem(floats(B, T, D))
class FunctionalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(7, D)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(F.linear(x, weight=self.w, bias=self.b))


@problem(floats(B, T, D))
class Matmul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(D, 7)), nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tanh(x @ self.w) @ self.v.T)


@problem(floats(B, T, D))
class MatmulOfEveryTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w.T + torch.matmul(x, self.w.mT).sin() + x.matmul(self.w.t()).cos()
        return per_user(y + x @ self.w.transpose(0, 1) + x @ self.w.permute(1, 0) + x @ self.w)


@problem(floats(B, D, 3))
class WeightOnTheLeft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, D))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.w @ x)


@problem(floats(B, 2, T, 3))
class WeightPerHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.matmul(x, self.w)) + per_user((x @ self.w) @ self.v)


@problem(floats(B, T, D))
class Conv1DOfHuggingFace(nn.Module):
    """addmm on rows flattened user by user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, 7)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, D), self.weight).view(*x.shape[:-1], 7)
        return per_user(y + torch.addmm(self.bias, x.view(-1, D), self.weight, beta=0.5, alpha=2.0).view_as(y))


@problem(floats(B, T, D))
class Conv1DPartlyFrozen(nn.Module):
    """addmm with only the bias trained, only the weight, a transposed weight, and a bias that is one row of users."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.frozen, self.fixed = nn.Parameter(torch.randn(D, D), False), nn.Parameter(torch.randn(D), False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        y = torch.addmm(self.b, rows, self.frozen)
        y = torch.addmm(self.fixed, y, self.a).tanh()
        y = torch.addmm(self.b, y, self.a.T)
        return per_user(torch.addmm(rows, y, self.a).view_as(x))


@problem(floats(B, T, D))
class FlattenedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.ln, self.shift = nn.Linear(D, D), nn.LayerNorm(D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(self.a(x.reshape(-1, D)) + self.shift)
        return per_user(y.view_as(x))


# -- tables -----------------------------------------------------------------------------------------------------------


@problem(ids())
class EmbeddingAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.e(x))


@problem(padded)
class EmbeddingPadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.out = nn.Embedding(V, D, padding_idx=0), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(self.out(torch.tanh(self.e(x).cumsum(1))), x, ignore=0) + per_user(self.e(x))


@problem(padded)
class EmbeddingPaddedFromTheEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(V, D))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(F.embedding(x, self.w, padding_idx=-V)) + per_user(F.embedding(x, self.w, -1))


@problem(ids())
class TableByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(V, D)), nn.Parameter(torch.randn(V))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.table[x]) + per_user(self.scale[x]) + per_user(self.table[-x - 1])


@problem(lambda: (torch.randint(0, V, (B,)),))
class OneItemAUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.e(x)) + per_user(torch.index_select(self.e.weight, 0, x))


@problem(ids())
class EmbeddingScaledInPlace(nn.Module):
    """As SASRec: seqs *= √d, then dropout-free sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(V, D), nn.Embedding(T, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        h *= D**0.5
        h += self.p(torch.arange(x.shape[1]))
        return per_user(torch.tanh(h))


# -- normalisation, convolution ---------------------------------------------------------------------------------------


@problem(floats(B, T, D))
class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.two = nn.LayerNorm(D), nn.LayerNorm((T, D), bias=False)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.two(torch.tanh(self.ln(x))))


@problem(floats(B, T, D))
class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.RMSNorm(D)
        nn.init.normal_(self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tanh(self.a(x)) + F.rms_norm(x, (D,), self.a.weight, 1e-3))


@problem(floats(B, 4, 9))
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(4, 6, 3, padding=1)
        self.b = nn.Conv1d(6, 4, 2, stride=2, dilation=2, groups=2)
        self.c = nn.Conv1d(4, 3, 2, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.c(torch.tanh(self.b(torch.relu(self.a(x))))))


# -- broadcasting -----------------------------------------------------------------------------------------------------


@problem(ids(users=T))
class PositionsOneDim(nn.Module):
    """Position ids of shape [T], with B = T."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p, self.out = nn.Embedding(V, D), nn.Embedding(T, D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x) + self.p(torch.arange(x.shape[1]))
        return next_token_loss(self.out(torch.tanh(h)), x)


@problem(ids(users=T))
class PositionsTwoDim(PositionsOneDim):
    """Position ids of shape [1, T], with B = T."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x) + self.p(torch.arange(x.shape[1]).unsqueeze(0))
        return next_token_loss(self.out(torch.tanh(h)), x)


@problem(ids(users=T))
class PositionsExpanded(PositionsOneDim):
    """Position ids expanded to [B, T], with B = T."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
        h = self.e(x) + self.p(places) + self.p(torch.arange(x.shape[1]).expand_as(x))
        return next_token_loss(self.out(torch.tanh(h)), x)


@problem(ids(users=T))
class PositionsFromBuffer(PositionsOneDim):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(2 * T).unsqueeze(0))
        self.p = nn.Embedding(2 * T, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x) + self.p(self.places[:, : x.shape[1]])
        return next_token_loss(self.out(torch.tanh(h)), x)


@problem(ids(users=T))
class PositionsBare(nn.Module):
    """A bare Parameter, sliced and added, with B = T."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p, self.q = (
            nn.Embedding(V, D),
            nn.Parameter(torch.randn(2 * T, D)),
            nn.Parameter(torch.randn(1, T, D)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tanh(self.e(x) + self.p[: x.shape[1]] + self.q) * self.p[None, : x.shape[1]])


@problem(ids())
class PositionsFromUsersMask(nn.Module):
    """Position ids counted from each user's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(V, D), nn.Embedding(T + 1, D)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tanh(self.e(x) + self.p((x > 3).long().cumsum(1))))


@problem(floats(B, T, D))
class ScalesAndShifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.width = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(D))
        self.place, self.both = nn.Parameter(torch.randn(T, 1)), nn.Parameter(torch.rand(1, T, D) + 1)

    def forward(self, x: Tensor) -> Tensor:
        y = (x + self.width) * self.number - self.place / self.both
        y = torch.where(x > 0, y, self.width) + torch.lerp(x, self.both, 0.3) + 2**self.number * x
        return per_user(torch.addcmul(y, x, self.width) + (3 - self.width) * x + F.softplus(self.number) * x)


@problem(floats(B, T, D))
class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.end, self.a = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        x = torch.cat([self.token.expand(b, -1, -1), x, self.end.repeat(b, 1, 1)], dim=1)
        return per_user(torch.stack([torch.tanh(self.a(x)), self.token.expand_as(x)], dim=-1))


# -- expressions of parameters ----------------------------------------------------------------------------------------


@problem(floats(B, T, D))
class SlicedWeight(nn.Module):
    """Parts of one weight in several linear layers, as packed projections are used."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3 * D, D)), nn.Parameter(torch.randn(3 * D))

    def forward(self, x: Tensor) -> Tensor:
        q = F.linear(x, self.w[:D], self.b[:D])
        k, v = (F.linear(x, w, b) for w, b in zip(self.w[D:].chunk(2), self.b[D:].chunk(2), strict=True))
        return per_user(q * k + v)


@problem(floats(B, T, D))
class LowRank(nn.Module):
    """A merged low-rank weight: W = W0 + A Bᵀ."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, D), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(7, 2)), nn.Parameter(torch.randn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(F.linear(x, self.w + self.a @ self.b.T))


@problem(floats(B, T, D))
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(D, 7))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.a(x))


@problem(floats(B, T, D))
class GeneratedBias(nn.Module):
    """A small network on constants makes a bias for every position; its parameters are used nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, D))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).unsqueeze(-1).to(x.dtype)
        return per_user(torch.tanh(x * self.net(places)))


@problem(floats(B, T, D))
class PublicReads(nn.Module):
    """Tables read by constants: all rows in their order, the first ones, some twice, padding, and with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.first, self.twice, self.hooked, self.tripled = (nn.Embedding(n, D) for n in (T, T + 3, T, T, T))
        self.padded = nn.Embedding(T, D, padding_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(T, device=x.device)
        hooked = self.hooked(places)
        hooked.register_hook(lambda grad: 3 * grad)
        tripled = self.tripled(places)
        assert tripled.grad_fn is None or tripled.grad_fn.register_hook(lambda to, _: (3 * to[0],))
        x = torch.tanh(x * self.all(places) + self.first(places[None]))
        return per_user(torch.tanh(x * self.twice(places // 2) + self.padded(places)) * hooked * tripled)


@problem(floats(B, 2, T, T))
class RelativePositions(nn.Module):
    """T5: a table of distances read by constant indices, shared by all users, with as many places as users."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * T, 2)

    def forward(self, x: Tensor) -> Tensor:
        far = torch.arange(T)[:, None] - torch.arange(T)[None, :] + T
        return per_user(torch.softmax(x + self.table(far).permute(2, 0, 1), -1))


# -- ties -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.mix = nn.Embedding(V, D), nn.Linear(D, D)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.e(x).cumsum(1)))


@problem(ids())
class TiedByModule(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(self.head(self.hidden(x)), x)


@problem(ids())
class TiedByFunction(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(F.linear(self.hidden(x), self.e.weight), x)


@problem(ids())
class TiedByMatmul(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(self.hidden(x) @ self.e.weight.T, x)


@problem(ids())
class TiedByCustomHead(Tied):
    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.table, self.bias = weight, nn.Parameter(torch.randn(V))

        def forward(self, h: Tensor) -> Tensor:
            return torch.matmul(h, self.table.transpose(0, 1)) + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(self.e.weight)

    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(self.head(self.hidden(x)), x)


@problem(padded)
class TiedWithoutThePaddingRow(nn.Module):
    """The head is a slice of the table: h @ E[1:].T."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.mix = nn.Embedding(V, D, padding_idx=0), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.e(x)))
        return next_token_loss(h @ self.e.weight[1:].T, x - 1, ignore=-1)


@problem(ids())
class TiedByScore(Tied):
    """Targets scored by a second look-up: ⟨h, E[next]⟩, as SASRec trains."""

    def forward(self, x: Tensor) -> Tensor:
        score = (self.hidden(x[:, :-1]) * self.e(x[:, 1:])).sum(-1)
        return F.softplus(-score).sum(1) + F.softplus((self.hidden(x) * self.e((x + 1) % V)).sum(-1)).sum(1)


@problem(ids())
class TiedHead(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return dp.softmax_loss(self.hidden(x[:, :-1]), self.e.weight, x[:, 1:])


@problem(padded)
class TiedHeadUnequalLengths(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(V))

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.where(x[:, 1:] == 0, -1, x[:, 1:])
        return dp.softmax_loss(self.hidden(x)[:, :-1], self.e.weight, targets, bias=self.bias) * 3


@problem(padded)
class TiedHeadOfWeightedPositions(TiedHeadUnequalLengths):
    """The last positions count most."""

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.where(x[:, 1:] == 0, -1, x[:, 1:])
        weights = torch.exp2(torch.arange(x.shape[1] - 1, device=x.device) / 2).expand(targets.shape) + targets.abs()
        weights = weights.where(targets >= 0, float("nan"))  # nobody looks there
        return dp.softmax_loss(self.hidden(x)[:, :-1], self.e.weight, targets, bias=self.bias, position_weights=weights)


@problem(padded)
class TiedHeadOfScaledRows(Tied):
    """Rows s·E in and out, of which E is trained."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.2, 3, V))

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.where(x[:, 1:] == 0, -1, x[:, 1:])
        h = self.hidden(x) * self.scale[x][..., None].to(self.e.weight.dtype)
        return dp.softmax_loss(h[:, :-1], self.e.weight, targets, row_scale=self.scale)


@problem(ids())
class SeparateHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.out = nn.Embedding(V, D), nn.Parameter(torch.randn(V, D))

    def forward(self, x: Tensor) -> Tensor:
        return dp.softmax_loss(self.e(x)[:, :-1], self.out, x[:, 1:])


@problem(ids())
class TwoHeads(Tied):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)[:, :-1]
        return dp.softmax_loss(h, self.e.weight, x[:, 1:]) + 2 * dp.softmax_loss(h.sin(), self.e.weight, x[:, :-1])


@problem(ids())
class TiedFourWays(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(V, 1))

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.hidden(x), self.e.weight
        logits = F.linear(h, w) + h @ w.T + F.linear(h, w * self.scale) + (h @ w[: V - 1].T).mean(-1, keepdim=True)
        return next_token_loss(logits, x) + dp.softmax_loss(h[:, :-1], w, x[:, 1:])


@problem(floats(B, T, D))
class OneBlockManyTimes(nn.Module):
    """ALBERT: the same block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.ln = nn.Linear(D, 8), nn.Linear(8, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.ln(x + self.b(F.gelu(self.a(x))))
        return per_user(x)


@problem(floats(B, T, D))
class SquareWeightUsedBothWays(nn.Module):
    """An autoencoder with tied weights: x Wᵀ, then @ W."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, D))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(F.linear(x, self.w)) @ self.w - x).square().flatten(1).sum(1)


# -- attention and recurrence as shipped by torch ---------------------------------------------------------------------


def causal(length: int, dtype: torch.dtype) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


@problem(floats(B, T, D))
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(D, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(D, 3, batch_first=True, kdim=D, vdim=D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, maps = self.a(x, x, x, attn_mask=causal(T, x.dtype), need_weights=True)
        z, _ = self.cross(y, x, x.sin(), need_weights=False)
        return per_user(z) + per_user(maps)


@problem(padded)
class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.e(x), src_mask=causal(T, self.e.weight.dtype), is_causal=True, src_key_padding_mask=x == 0)
        return next_token_loss(F.linear(h, self.e.weight), x, ignore=0)


@problem(ids())
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.e(x), mask=causal(T, self.e.weight.dtype), is_causal=True)
        return next_token_loss(F.linear(h, self.e.weight), x)


@problem(ids())
class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.block = nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.block(self.e(x), self.e(x.flip(1))))


@problem(padded)
class SASRec(nn.Module):
    """As commonly written: time first around the attention, convolutions as feed-forward, BPR-like scores."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(V, D, padding_idx=0), nn.Embedding(T + 1, D, padding_idx=0)
        self.norm1, self.attention = nn.LayerNorm(D, eps=1e-8), nn.MultiheadAttention(D, 1)
        self.norm2, self.conv1, self.conv2 = nn.LayerNorm(D, eps=1e-8), nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 1)
        self.last = nn.LayerNorm(D, eps=1e-8)

    def forward(self, x: Tensor) -> Tensor:
        seqs = self.items(x)
        seqs *= D**0.5
        places = torch.arange(1, T + 1).unsqueeze(0).expand(x.shape[0], -1) * (x != 0)
        seqs += self.places(places)
        seqs = torch.transpose(seqs, 0, 1)
        q = self.norm1(seqs)
        mixed, _ = self.attention(q, seqs, seqs, attn_mask=~torch.tril(torch.ones((T, T), dtype=torch.bool)))
        seqs = torch.transpose(q + mixed, 0, 1)
        seqs = self.norm2(seqs)
        seqs = seqs + self.conv2(torch.relu(self.conv1(seqs.transpose(-1, -2)))).transpose(-1, -2)
        score = (self.last(seqs)[:, :-1] * self.items(x[:, 1:])).sum(-1)
        return (F.softplus(-score) * (x[:, 1:] != 0)).sum(1)


@problem(ids(users=T))
class TurnedTimeFirst(nn.Module):
    """Layers on data that the model itself turns time first, with B = T."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.ln, self.a = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.shift, self.places = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(T, D))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(self.ln(self.e(x.T))) * self.shift).cumsum(0)
        return per_user(self.ln(h.permute(1, 0, 2)) + self.places)


@problem(ids())
class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.rnn = nn.Embedding(V, D), nn.GRU(D, D, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, last = self.rnn(self.e(x))
        return next_token_loss(F.linear(h, self.e.weight), x) + per_user(last.transpose(0, 1))


@problem(ids())
class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.rnn = nn.Embedding(V, D), nn.LSTM(D, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        h, (last, cell) = self.rnn(self.e(x))
        return per_user(h) + per_user(last.transpose(0, 1)) + per_user(cell.transpose(0, 1))


@problem(ids())
class TimeFirstLSTM(nn.Module):
    """The recurrent layer itself may be time first: torch says which dimension is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.e(x).transpose(0, 1))
        return next_token_loss(F.linear(h.transpose(0, 1), self.e.weight), x)


@problem(ids())
class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.a, self.b = nn.RNN(D, D, batch_first=True), nn.RNN(D, D, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.b(self.a(self.e(x))[0])[0])


@problem(ids())
class UnrolledCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.gru, self.lstm = nn.Embedding(V, D), nn.GRUCell(D, D), nn.LSTMCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state, both = None, None
        for t in range(x.shape[1]):
            state = self.gru(self.e(x[:, t]), state)
            both = self.lstm(state, both)
        return per_user(both[0])


@problem(ids())
class CellByHand(nn.Module):
    """A recurrent cell written out, beginning from zeros made in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.w, self.start = nn.Embedding(V, D), nn.Linear(2 * D, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], D, dtype=self.e.weight.dtype) + self.start
        for t in range(x.shape[1]):
            h = torch.tanh(self.w(torch.cat([h, self.e(x[:, t])], -1)))
        return per_user(h)


# -- the paper's own model --------------------------------------------------------------------------------------------


@problem(padded)
class ReAttention(nn.Module):
    """The Transformer with variances tracked beside its activations: they carry no gradient, norms stay exact."""

    variant: bool | str = True

    def __init__(self) -> None:
        super().__init__()
        self.body = dp.models.Transformer(V, T, dim=D, heads=2, blocks=2, dropout=0.0, reattention=self.variant)
        self.body.set_privacy(1.5, 20, torch.linspace(0.01, 0.9, V))

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.where(x[:, 1:] == 0, -1, x[:, 1:])
        return self.body(dp.models.Batch(x[:, :-1], targets, (x[:, :-1] > 0).sum(1)))


@problem(padded)
class ReAttentionLiteral(ReAttention):
    variant = "literal"


# -- functions without a rule of their own ----------------------------------------------------------------------------


@problem(floats(B, T, D))
class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(7, D)), nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bthd,hdk->bhtk", x.view(B if len(x) == B else len(x), T, 2, 3), self.v)
        return per_user(torch.einsum("btd,md->btm", x, self.w)) + per_user(heads)


@problem(floats(B, T, D))
class Tensordot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, D))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tensordot(x, self.w, dims=([2], [1])))


@problem(floats(B, 4, 5, 6))
class Convolution2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 4, (2, 3), stride=(2, 1), dilation=(1, 2), groups=2)
        self.c = nn.Conv2d(4, 3, 2, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.c(torch.tanh(self.b(torch.relu(self.a(x))))))


@problem(floats(B, 4, 5))
class TransposedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ConvTranspose1d(4, 6, 3, stride=2)
        self.b = nn.ConvTranspose2d(6, 2, (1, 2), padding=(0, 1), groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.b(torch.tanh(self.a(x))[:, :, None]))


@problem(floats(B, 2, 3, 4, 3))
class Convolution3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv3d(2, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.a(x))


@problem(floats(B, D, 5))
class GroupAndInstanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.GroupNorm(2, D), nn.InstanceNorm1d(D, affine=True), nn.InstanceNorm1d(D)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.c(torch.tanh(self.b(x + self.a(x)))))


@problem(floats(B, T, D))
class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.many = nn.PReLU(), nn.PReLU(T)
        nn.init.normal_(self.many.weight)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.one(x) + self.many(x).sin())


@problem(floats(B, T, D))
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Bilinear(D, D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.a(x, x.sin()))


@problem(padded)
class EmbeddingBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.mean = nn.EmbeddingBag(V, D, mode="sum", padding_idx=0), nn.EmbeddingBag(V, D, mode="mean")
        self.max, self.weights = nn.EmbeddingBag(V, D, mode="max"), nn.Parameter(torch.randn(V))

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.sum(x) + self.mean(x).sin() + self.max(x)) + per_user(
            self.sum(x, per_sample_weights=self.weights[x])
        )


@problem(floats(B, 2, T, 3))
class LearnedAttentionBias(nn.Module):
    """As T5: scaled_dot_product_attention with a mask that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * T, 2)

    def forward(self, x: Tensor) -> Tensor:
        far = torch.arange(T)[:, None] - torch.arange(T)[None, :] + T
        bias = self.table(far).permute(2, 0, 1)[None]
        return per_user(F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=bias, scale=1.0))


@problem(floats(B, 2, T, 3))
class LearnedQueries(nn.Module):
    """As a Perceiver: the queries are parameters, expanded to the batch or not."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(1, 2, 4, 3)), nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.q.expand(len(x), -1, -1, -1), x, x)
        return per_user(y) + per_user(F.scaled_dot_product_attention(x, self.k.expand(len(x), 2, 4, 3), y))


@problem(floats(B, D, 5))
class FrozenBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv1d(D, D, 1), nn.BatchNorm1d(D).eval()
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(torch.tanh(self.norm(self.a(x))))


@problem(floats(B, T, D))
class FilterInFrequencies(nn.Module):
    """FMLP-Rec: a filter on the Fourier transform along time."""

    def __init__(self) -> None:
        super().__init__()
        self.complex_weight = nn.Parameter(torch.randn(1, T // 2 + 1, D, 2))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(self.norm(x), dim=1, norm="ortho") * torch.view_as_complex(self.complex_weight)
        return per_user(torch.tanh(torch.fft.irfft(f, n=T, dim=1, norm="ortho")))


@problem(floats(B, T, D))
class LookupsInOrder(nn.Module):
    """Functions that nobody wrote a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.m = (
            nn.Parameter(torch.randn(D)),
            nn.Parameter(torch.randn(D, 3)),
            nn.Parameter(torch.randn(1, D)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.hypot(x, self.w.expand(D)) + torch.cdist(x, self.v.T).sum(-1, keepdim=True)
        return per_user(y + F.cosine_similarity(x, self.m[None], dim=-1)[..., None]) + per_user(torch.atan2(x, self.w))


# -- rows picked out of users' rows -----------------------------------------------------------------------------------


def unequal() -> tuple[Tensor, ...]:
    """Data and how many positions of each user count."""
    return torch.randn(B, T, D), torch.tensor([1, T, 2, 3])[:B]


@problem(unequal)
class ByMask(nn.Module):
    """hidden[mask]: unequal numbers of rows, in all layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.ln, self.shift = nn.Linear(D, D), nn.LayerNorm(D), nn.Parameter(torch.randn(D))
        self.w = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        mask = torch.arange(T)[None] < n[:, None]
        h = self.ln(torch.tanh(self.a(x)[mask])) * self.shift
        h = (h.view(-1, 3) @ self.w.T).view(-1, 4)
        out = x.new_zeros(len(x), T, 4)
        out[mask] = h
        return per_user(out)


@problem(floats(B, T, D))
class Experts(nn.Module):
    """A router sends each position to two of three experts, as Mixtral does: index, linear layers, index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = (
            nn.Linear(D, 3),
            nn.Parameter(torch.randn(3, 8, D)),
            nn.Parameter(torch.randn(3, D, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x.reshape(-1, D))
        weights, chosen = torch.topk(torch.softmax(self.router(h), -1), 2)
        out = torch.zeros_like(h)
        for expert in range(3):
            place, slot = torch.where(chosen == expert)
            y = F.linear(torch.relu(F.linear(h[place], self.up[expert])), self.down[expert])
            out.index_add_(0, place, y * weights[place, slot, None])
        return per_user(out.view_as(x))


@problem(floats(B, T, D))
class ExpertsSorted(Experts):
    """The same by sorting the positions by expert, and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x.reshape(-1, D))
        weights, chosen = torch.topk(torch.softmax(self.router(h), -1), 2)
        order = torch.argsort(chosen.flatten(), stable=True)
        y = h[order // 2]
        ends = torch.bincount(chosen.flatten(), minlength=3).cumsum(0).tolist()
        parts = zip([0, *ends[:-1]], ends, strict=True)
        y = torch.cat([torch.relu(y[a:b] @ self.up[e].T) @ self.down[e].T for e, (a, b) in enumerate(parts)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        y = y[back] * weights.reshape(-1, 1)
        return per_user(self.last(y).view(len(h), 2, D).sum(1).view_as(x))
