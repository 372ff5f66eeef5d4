"""A clip factor is never too large, however rounding falls; and the constants that nothing else pins."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import parameter_norms as norms_module
from dpformer.clipping import rounding
from dpformer.clipping.uses import pairs
from dpformer.kernels import native
from dpformer.models.softmax_head import HeadRows, longest
from tests.clipping.naive import engine, norms_of, one_at_a_time, sums


class Weighted(nn.Module):
    """Gradient of a user: Σ_t left_t ⊗ right_t, with both in our hands."""

    def __init__(self, out: int, wide: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(out, wide))

    def forward(self, right: Tensor, left: Tensor) -> Tensor:
        return (F.linear(right, self.w) * left).sum((1, 2))


def length_in_the_sum(model: nn.Module, *batch: Tensor, clip: dp.clipping.ClipFunction) -> float:
    """What one user adds, in float64."""
    engine(model, batch, clip, self_check=False)
    return float(torch.stack([g.double().square().sum() for g in sums(model)]).sum().sqrt())


def cancelling(rows: int, out: int, wide: int, size: float, seed: int) -> tuple[Tensor, Tensor]:
    """One user whose rows come in pairs that nearly cancel: large parts, a gradient of length about 2."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(1, rows, out, generator=generator), torch.randn(1, rows, wide, generator=generator)
    left, right = left / out**0.5 * size, right / wide**0.5 * size
    half = rows // 2
    left[:, half:], right[:, half:] = -left[:, :half], right[:, :half]
    right[:, 0] += 2 / size / wide**0.5
    return right, left


@pytest.mark.parametrize("size", [3.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("shape", [(2, 300, 400), (64, 96, 384), (12, 40, 50), (200, 300, 40)])
def test_rows_that_cancel(shape: tuple[int, int, int], size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Gram form the norm came out as 1.5 for 2.0, and the user contributed 4/3 of C."""
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf"))  # Gram wherever it is allowed
    for seed in range(3):
        right, left = cancelling(*shape, size, seed)
        model = Weighted(shape[1], shape[2])
        truth = float(norms_of(one_at_a_time(model.double(), (right.double(), left.double())))[0])
        length = length_in_the_sum(model.float(), right, left, clip=dp.clip(1.0))
        assert length <= 1 + 1e-6, f"{length} of a gradient of length {truth}"
        assert length >= 0.9 * min(1.0, truth) or size > 30  # and hardly less than it may be


def test_without_the_guard_the_factor_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is needed: with it switched off the same users contribute more than C."""
    monkeypatch.setattr("dpformer.clipping.rules.one_user.is_plain", lambda *_: False)
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf"))
    monkeypatch.setattr(norms_module, "square_error", lambda square, rows: 0 * square)
    monkeypatch.setattr(norms_module, "CANCEL", float("inf"))
    longest = 0.0
    for seed in range(6):
        right, left = cancelling(200, 300, 40, 1000.0, seed)
        longest = max(longest, length_in_the_sum(Weighted(300, 40), right, left, clip=dp.clip(1.0)))
    assert longest > 1.001


@pytest.mark.parametrize("kind", ["gram", "written"])
def test_upper_bounds_hold_against_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf") if kind == "gram" else 0.0)
    monkeypatch.setattr(norms_module, "LOOSE", float("inf"))
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(3, 50, 700, generator=generator) * 10 ** torch.randn(3, 50, 1, generator=generator)
        right = torch.randn(3, 50, 30, generator=generator)
        use = pairs.Outer(left, right, (700, 30))
        group = norms_module.ParameterUses(torch.zeros(700, 30), [use])
        (square,), (upper,) = norms_module.raised_squares(group.measure(3, 0))  # nothing is kept
        exact = torch.bmm(left.double().mT, right.double()).square().sum((1, 2)).numpy()
        assert (upper >= exact).all() and (upper <= 1.05 * square).all()


def test_bounds_of_many_parameters_at_once_are_those_of_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)

    def rows(*size: int) -> Tensor:
        return torch.randn(3, *size, generator=generator)

    ids = torch.randint(0, 9, (3, 6), generator=generator)
    uses: list[list[Any]] = [
        [pairs.Outer(rows(50, 7), rows(50, 30), (7, 30))],
        [pairs.Outer(rows(5, 40), rows(5, 300), (40, 300)), pairs.Outer(rows(2, 40), rows(2, 300), (40, 300))],
        [pairs.Lookup(ids, rows(6, 4), (9, 4)), pairs.Outer(rows(3, 9), rows(3, 4), (9, 4))],
        [pairs.Lookup(ids, rows(6, 4), (9, 4)), pairs.Dense(rows(9, 4))],
    ]
    x, y = rows(20, 7), rows(20, 30)
    uses.append([pairs.Outer(torch.cat([x, x], 1), torch.cat([y, -y * (1 + 1e-6)], 1), (7, 30))])  # rows that cancel

    def measured() -> list[norms_module.Measured]:
        groups = [norms_module.ParameterUses(torch.zeros(some[0].shape), list(some)) for some in uses]
        return [m for group in groups for m in group.measure(3, 0)]

    many, alone = measured(), measured()
    squares, uppers = norms_module.raised_squares(many)
    for n, one in enumerate(alone):
        (square,), (upper,) = norms_module.raised_squares([one])
        assert (squares[n] == square).all() and (uppers[n] == upper).all()
        assert set(one.group.alone) == set(many[n].group.alone)
    assert set(many[-1].group.alone) == {0, 1, 2} and not any(m.group.alone for m in many[:-1])


def test_long_inner_products_are_sums_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 1000, generator=generator), torch.randn(2, 7, 1000, generator=generator)
    exact = torch.bmm(a.double(), b.double().mT)
    torch.testing.assert_close(pairs.products(a, b).double(), exact, rtol=0, atol=1e-4)
    u, v = torch.ones(1, 1, 700), torch.ones(1, 1, 700)
    assert float(pairs.products(u, v)) == 700


def test_a_table_is_squared_piece_by_piece() -> None:
    rows = torch.full((2, 3 * rounding.PIECE + 5), 0.1)
    square, upper = rounding.squared_lengths(rows)
    exact = rows.double().square().sum(1)
    torch.testing.assert_close(square.double(), exact, rtol=4e-3, atol=0)
    assert bool((upper.double() >= exact).all())


def test_short_products_are_not_used_for_norms() -> None:
    """TF32 and bfloat16 inside matrix products are for the model, not for what bounds it."""
    seen = []
    real = torch.bmm

    class Watched(nn.Linear):
        pass

    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "kernels", None)
            patch.setattr(
                torch, "bmm", lambda *a, **k: (seen.append(torch.get_float32_matmul_precision()), real(*a, **k))[1]
            )
            engine(_Losses(Watched(6, 7)), (torch.randn(4, 3, 6),), dp.clip(1.0))
        assert seen and set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


class _Losses(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().flatten(1).sum(1)


def test_backward_inside_autocast_has_norms_in_float32() -> None:
    torch.manual_seed(0)
    model, x = _Losses(nn.Linear(40, 30)), torch.randn(4, 3, 40)
    clipping = dp.PhantomClipping(model, self_check=False)
    with clipping.users(x) as user:
        losses = model(user)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norms = clipping.backward(losses, dp.clip(1.0))
    truth = norms_of(one_at_a_time(model, (x,)))
    torch.testing.assert_close(norms, truth, rtol=1e-2, atol=0)


# Constants that a mutation could change unseen.


@pytest.mark.parametrize("norm", [1e-3, 0.5, 1.0, 7.0, 1e4])
def test_the_formulas_of_the_factors(norm: float) -> None:
    n = torch.tensor([norm], dtype=torch.float64)
    assert float(dp.normalize(2.0)(n)) == pytest.approx(2.0 / (norm + 0.01), rel=1e-12)
    assert float(dp.normalize(2.0, gamma=0.5)(n)) == pytest.approx(2.0 / (norm + 0.5), rel=1e-12)
    assert float(dp.clip(2.0)(n)) == pytest.approx(min(1.0, 2.0 / norm), rel=1e-12)


@pytest.mark.parametrize("clip", [dp.clip(1.0), dp.normalize(1.0)], ids=["clip", "normalize"])
def test_a_long_gradient_comes_out_at_the_bound(clip: dp.clipping.ClipFunction) -> None:
    """Neither above C nor far below: C/(n + 0.5) would leave 0.87 of this one."""
    right, left = torch.ones(1, 1, 2), torch.full((1, 1, 2), 1.6)
    assert 0.99 < length_in_the_sum(Weighted(2, 2), right, left, clip=clip) <= 1.0


@pytest.mark.parametrize("excess", [1.001, 1.5, 1.99])
def test_a_promise_broken_by_a_little(excess: float) -> None:
    class Broken(dp.clip):
        def __call__(self, norms: Tensor) -> Tensor:
            return excess * super().__call__(norms)

    with pytest.raises(ValueError, match="promises norms up to"):
        engine(_Losses(nn.Linear(6, 7)), (10 * torch.ones(4, 3, 6),), Broken(1.0))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -5.0])
def test_factors_that_are_no_factors(factor: float) -> None:
    class Broken(dp.clip):
        def __call__(self, norms: Tensor) -> Tensor:
            return torch.full_like(norms, factor)

    with pytest.raises(ValueError, match="promises norms up to"):
        engine(_Losses(nn.Linear(6, 7)), (torch.ones(4, 3, 6),), Broken(1.0))


class Product(nn.Module):
    """The gradient of a user is Σ_t y_t x_tᵀ."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) * y).sum((1, 2))


def cancelling_in_pairs(width: int, rows: int, ratio: float, padded: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows that cancel in pairs, but for the first: Σ‖g_t‖ is about `ratio` times the norm, which is about 3."""
    x, y = torch.randn(2, 1, 1, width, generator=torch.Generator().manual_seed(seed))
    sign = torch.tensor([1.0, -1.0] * (rows // 2))
    sign[0] += rows / ratio
    right, left = (x / x.norm()).expand(1, rows, width), y / y.norm() * sign[:, None] * 3 * ratio / rows
    return F.pad(right, (0, 0, 0, padded - rows)), F.pad(left, (0, 0, 0, padded - rows))


def clipped_sum(users: list[tuple[Tensor, Tensor]], clip: dp.clipping.ClipFunction) -> Tensor:
    model = Product(users[0][0].shape[-1])
    clipping = dp.PhantomClipping(model, self_check=False)
    with clipping.users(tuple(torch.cat(parts) for parts in zip(*users, strict=True))) as user:
        loss = model(*user)
    clipping.backward(loss, clip)
    gradient = model.layer.weight.grad
    assert gradient is not None
    return gradient.double()


CLIPS = pytest.mark.parametrize("clip", [dp.clip(1.0), dp.normalize(1.0)], ids=["clip", "normalize"])


@CLIPS
def test_nobody_changes_the_factors_of_others(clip: dp.clipping.ClipFunction) -> None:
    """Others are just tight enough for products of rows, and one user's rows cancel more: it must not take them along.

    They all point the same way: together they moved the sum by 3.7 C when one user decided for the whole micro-batch.
    """
    same, attacker = [cancelling_in_pairs(512, 8, 33.0, 8)] * 150, cancelling_in_pairs(512, 8, 60.0, 8)
    moved = clipped_sum([*same, attacker], clip) - clipped_sum(same, clip)
    assert float(moved.norm()) <= 1 + 1e-4
    assert float((moved - clipped_sum([attacker], clip)).norm()) < 1e-3


@CLIPS
@pytest.mark.parametrize("ratio", [20.0, 45.0, 64.0, 300.0])
def test_a_long_history_does_not_change_the_factors_of_others(clip: dp.clipping.ClipFunction, ratio: float) -> None:
    """It pads the rows of all, so that gradients are written out instead: bounds of norms must not follow."""
    short, long = ([cancelling_in_pairs(64, 8, ratio, padded)] * 400 for padded in (8, 600))
    attacker = cancelling_in_pairs(64, 600, 2.0, 600)
    moved = clipped_sum([*long, attacker], clip) - clipped_sum(short, clip)
    assert float(moved.norm()) <= 1 + 1e-3


@CLIPS
@pytest.mark.parametrize("ratio", [20.0, 300.0, 30000.0])
def test_one_user_more_does_not_change_what_is_kept(
    clip: dp.clipping.ClipFunction, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written-out gradients are kept while they fit: whether they do must not change the factors of others."""
    users = [cancelling_in_pairs(32, 64, ratio, 64)] * 100
    monkeypatch.setattr("dpformer.clipping.parameter_norms.KEEP", 100 * 32 * 32)
    moved = clipped_sum([*users, cancelling_in_pairs(32, 64, 2.0, 64)], clip) - clipped_sum(users, clip)
    assert float(moved.norm()) <= 1 + 1e-3


def crafted(rows: int, width: int, ratio: float, users: int = 200) -> tuple[Tensor, Tensor]:
    """Users whose rows cancel in pairs `ratio`-fold, each rounded otherwise; all numbers of a row are alike."""
    generator = torch.Generator().manual_seed(rows * width)

    def sizes(*shape: int) -> Tensor:
        return 0.5 + torch.rand(users, *shape, generator=generator)

    right = sizes(1, 1) * (1 + 1e-3 * sizes(rows, 1)).expand(users, rows, width)
    sign = torch.tensor([1.0, -1.0] * (rows // 2)).expand(users, rows) / right[..., 0]
    left = sizes(1, 1) * sign[..., None].expand(users, rows, width)
    left = left + (torch.arange(rows) == 0)[None, :, None] * left * (rows / ratio)
    return right.contiguous(), left.contiguous()


def upper_norms(right: Tensor, left: Tensor) -> Tensor:
    use = pairs.Outer(left, right, (left.shape[2], right.shape[2]))
    group = norms_module.ParameterUses(torch.zeros(use.shape), [use])
    parts = [norms_module.raised_squares([m])[1][0] for m in group.measure(len(left), norms_module.KEEP)]
    return torch.from_numpy(np.concatenate(parts)).sqrt()


CRAFTED = pytest.mark.parametrize(
    ("rows", "width", "ratio"), [(2, 1, 200), (2, 64, 60), (2, 64, 14), (4, 8, 40), (8, 32, 50), (60, 8, 40)]
)


@CRAFTED
def test_a_newcomer_does_not_change_how_norms_of_others_round(rows: int, width: int, ratio: float) -> None:
    """A long history pads the rows of all: products of rows rounded otherwise, or gradients were written out.

    Norms of the worst of these users changed by 0.2 % of themselves, and thousands alike would move together.
    """
    right, left = crafted(rows, width, ratio)
    short = upper_norms(right, left)
    for padded in (rows + 7, 100, 600):
        newcomer = torch.ones(1, padded, width)
        wide = [torch.cat([F.pad(part, (0, 0, 0, padded - rows)), newcomer]) for part in (right, left)]
        limit = 1e-9 if native.kernels is not None else 5e-6  # what the order of a matrix library's additions does
        assert float((upper_norms(*wide)[:-1] / short - 1).abs().max()) < limit


@CRAFTED
def test_a_newcomer_who_cancels_is_computed_again_alone(rows: int, width: int, ratio: float) -> None:
    """In float64, which rounds otherwise: everybody else's norm stays as it was."""
    users, newcomer = crafted(rows, width, ratio), crafted(rows, width, 1e6, users=1)
    both = [torch.cat(parts) for parts in zip(users, newcomer, strict=True)]
    assert float((upper_norms(*both)[:-1] / upper_norms(*users) - 1).abs().max()) < 1e-9


@CRAFTED
def test_thousands_of_crafted_users_hardly_move(
    rows: int, width: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the same worst user; one more, with a long history, leaves no room to keep gradients."""
    right, left = crafted(rows, width, ratio)
    short = upper_norms(right, left)
    long = upper_norms(*(F.pad(part, (0, 0, 0, 600 - rows)) for part in (right, left)))
    worst = int((long / short - 1).abs().argmax())
    others, users = (right[worst : worst + 1], left[worst : worst + 1]), 500
    monkeypatch.setattr("dpformer.clipping.parameter_norms.KEEP", users * width * width)
    before = clipped_sum([others] * users, dp.clip(1e-3))
    newcomer = (torch.ones(1, 100, width), torch.zeros(1, 100, width))
    padded = (F.pad(others[0], (0, 0, 0, 100 - rows)), F.pad(others[1], (0, 0, 0, 100 - rows)))
    moved = clipped_sum([*[padded] * users, newcomer], dp.clip(1e-3)) - before
    assert float(moved.norm()) / 1e-3 / users < 5e-6


@pytest.mark.parametrize("kind", ["outer", "tied", "ragged"])
@pytest.mark.parametrize("room", [0, 1 << 30], ids=["not kept", "kept"])
@pytest.mark.parametrize("counts", [[2, 3, 40, 40, 0, 1], [1, 2, 3, 30, 35, 40]], ids=["scattered", "sorted"])
def test_users_with_few_rows_beside_users_with_many(
    kind: str, room: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms by both ways in one batch, two to four users at a time where gradients are not kept, against float64."""
    monkeypatch.setattr(norms_module, "KEEP", 4 * 64 * 30)
    generator = torch.Generator().manual_seed(0)
    shape, users = (64, 30), len(counts)
    left, right = torch.randn(users, 40, 64, generator=generator), torch.randn(users, 40, 30, generator=generator)
    left = left * (torch.arange(40) < torch.tensor(counts)[:, None])[..., None]
    real = (torch.arange(40) < torch.tensor(counts)[:, None]).flatten()
    uses: list[Any] = [pairs.Outer(left, right, shape)]
    if kind == "tied":
        ids = torch.randint(0, 64, (users, 5), generator=generator)
        uses.append(pairs.Lookup(ids, torch.randn(users, 5, 30, generator=generator), shape))
    if kind == "ragged":
        uses = [pairs.Ragged(left.flatten(0, 1)[real], right.flatten(0, 1)[real], counts, shape)]
    exact = norms_module.written_in_double(uses).square().sum((1, 2))
    group = norms_module.ParameterUses(torch.zeros(shape), uses)
    for part in group.measure(users, room):
        (square,), (upper,) = norms_module.raised_squares([part])
        own = exact[part.first : part.first + len(square)].numpy()
        np.testing.assert_allclose(square, own, rtol=1e-6, atol=0)
        assert (upper >= own).all()


@pytest.mark.parametrize("rows", [3, 40])
def test_the_self_check_changes_no_bit(rows: int) -> None:
    """Its gradients are not kept but written out again; which batches are proven is nobody's seed."""
    torch.manual_seed(0)
    model, x = _Losses(nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 8))), torch.randn(5, rows, 16)
    x[0, 2:] = 0
    engine(model, (x,), dp.clip(1.0), self_check=True)
    proven = [g.clone() for g in sums(model)]
    engine(model, (x,), dp.clip(1.0), self_check=False)
    assert all(torch.equal(a, b) for a, b in zip(proven, sums(model), strict=True))


def test_a_part_of_ragged_rows_is_what_these_users_have() -> None:
    left, right, counts = torch.randn(6, 3), torch.randn(6, 2), [1, 3, 0, 2]
    whole = pairs.Ragged(left, right, counts, (3, 2))
    for user in range(len(counts)):
        torch.testing.assert_close(whole.part(user, user + 1).dense()[0], whole.dense()[user])


@pytest.mark.parametrize("items", [2, 50, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_residuals_are_no_longer_than_is_said_without_reading_them(items: int, spread: float) -> None:
    """Sure of the target, sure of another item, or of nothing."""
    generator = torch.Generator().manual_seed(items)
    hidden = torch.randn(400, 8, generator=generator)
    weight, targets = torch.randn(items, 8, generator=generator), torch.randint(items, (400,), generator=generator)
    rows = HeadRows.of(hidden[:, None] * spread, weight, targets[:, None], None)
    rows.losses()
    residual = rows.residual(slice(0, 400))
    bound, exact = longest(residual, targets).double(), torch.linalg.vector_norm(residual.double(), dim=1)
    assert (bound >= exact).all()
    assert (bound <= exact * math.sqrt(2) + 2e-7 * (items + 8)).all()
