"""Compiled code against float64, and that nobody changes how others round."""

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import parameter_norms as norms
from dpformer.clipping.rounding import MOST, row_lengths, without_zeros
from dpformer.clipping.uses import Lookup, Outer, Ragged
from dpformer.kernels import native
from dpformer.kernels.products import can_multiply, gram_squares, measured_products, products
from tests.clipping.naive import engine, norms_of, one_at_a_time

needed = pytest.mark.skipif(
    native.kernels is None or not native.kernels.multiplies, reason="nothing was compiled for this processor"
)
SHAPES = [
    (users, rows, high, wide)
    for users, rows in ((1, 1), (3, 7), (5, 70))
    for high, wide in ((1, 1), (3, 5), (8, 8), (12, 32), (13, 77), (25, 16), (40, 9), (50, 3), (300, 8), (129, 65))
] + [(2, 130, 1500, 40), (2, 100, 12, 2100), (0, 3, 4, 5), (2, 0, 4, 5)]


def sides(users: int, rows: int, high: int, wide: int) -> tuple[Tensor, Tensor]:
    return torch.randn(users, rows, high), torch.randn(users, rows, wide)


def exactly(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left.double().mT, right.double())


def test_compiled_code_is_there_where_a_compiler_is() -> None:
    """It is optional, so nothing else would say that it does not build any more."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler")
    assert native.kernels is not None


@needed
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_their_squares(shape: tuple[int, int, int, int]) -> None:
    left, right = sides(*shape)
    written, squares = products(left, right)
    exact = exactly(left, right)
    assert squares is not None
    torch.testing.assert_close(written.double(), exact, rtol=0, atol=3e-6 * (1 + shape[1]) ** 0.5)
    torch.testing.assert_close(squares, exact.square().sum((1, 2)), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(gram_squares(left, right), exact.square().sum((1, 2)), rtol=1e-12, atol=1e-30)


@needed
def test_sides_with_gaps_and_turned() -> None:
    left, right = torch.randn(4, 20, 9)[:, ::2, 1:8], torch.randn(4, 6, 10).mT
    written, squares = products(left, right)
    assert squares is not None
    torch.testing.assert_close(written.double(), exactly(left, right), rtol=0, atol=1e-5)
    told, made = measured_products(left, right, reach=0.0)
    assert made is not None and torch.equal(made[0], written) and torch.equal(made[1], squares)
    lengths = left.double().norm(dim=2) * right.double().norm(dim=2)
    torch.testing.assert_close(torch.from_numpy(told[:, 0]), lengths.sum(1), rtol=1e-12, atol=0)


@needed
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 1], ids=str)
def test_nobody_else_changes_a_bit(shape: tuple[int, int, int, int]) -> None:
    """Alone, among others, padded by another user's long history, by one thread or by two: the same bits."""
    left, right = sides(*shape)
    whole, squares = products(left, right)
    inner = gram_squares(left, right)
    assert squares is not None
    for user in range(len(left)):
        one, square = products(left[user : user + 1], right[user : user + 1])
        assert torch.equal(one[0], whole[user]) and square is not None and torch.equal(square[0], squares[user])
    for more in (1, 9, 400):
        long = F.pad(left, (0, 0, 0, more)), F.pad(right, (0, 0, 0, more))
        padded, padded_squares = products(*long)
        assert torch.equal(padded, whole) and padded_squares is not None and torch.equal(padded_squares, squares)
        torch.testing.assert_close(gram_squares(*long), inner, rtol=1e-15, atol=0)


@needed
def test_rows_far_apart_have_the_same_squares() -> None:
    """More than 96 rows of more than 1,024 numbers are copied first; code that was compiled twice rounded otherwise."""
    for high, wide in ((2048, 65), (1536, 128), (1200, 32), (1030, 36)):
        left, right = torch.randn(3, 60, high), torch.randn(3, 60, wide)
        short, long = products(left, right), products(*(F.pad(side, (0, 0, 0, 60)) for side in (left, right)))
        assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])


@needed
def test_a_user_whose_table_cancels_or_is_not_a_number_changes_nobody_else() -> None:
    uses = (
        Outer(*sides(3, 20, 30, 200), (30, 200)),
        Lookup(torch.randint(0, 30, (3, 9)), torch.randn(3, 9, 200), (30, 200)),
    )
    _, before = norms.squared_gradients(uses)
    for strange in (1e4, float("nan")):
        uses[1].grad[1] *= strange
        _, after = norms.squared_gradients(uses)
        assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])


@needed
def test_how_far_reads_are_padded_changes_nothing() -> None:
    ids, grad = torch.randint(1, 4, (1, 30)), torch.randn(1, 30, 16)
    found = [
        Lookup(F.pad(ids, (0, more)), F.pad(grad, (0, 0, 0, more)), (5000, 16)).squares() for more in (0, 7, 994, 995)
    ]
    assert all(torch.equal(one, found[0]) for one in found)


@needed
def test_numbers_that_are_negated_when_they_are_read() -> None:
    x = torch._neg_view(torch.randn(4, 3, 5))
    model = nn.Linear(5, 2)
    found = engine(_Summed(model), (x,), dp.clip(1.0))
    torch.testing.assert_close(found, engine(_Summed(model), (x.resolve_neg(),), dp.clip(1.0)))


class _Summed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().sum((1, 2))


@needed
def test_threads_change_nothing(two_threads: None) -> None:
    left, right = torch.randn(9, 64, 300), torch.randn(9, 64, 200)
    many = products(left, right), gram_squares(left, right), measured_products(left, right, 0.0)
    torch.set_num_threads(1)
    one = products(left, right), gram_squares(left, right), measured_products(left, right, 0.0)
    assert torch.equal(many[0][0], one[0][0]) and torch.equal(many[0][1], one[0][1]) and torch.equal(many[1], one[1])
    assert np.array_equal(many[2][0], one[2][0]) and torch.equal(many[2][1][0], one[2][1][0])


@needed
@pytest.mark.parametrize("counts", [[3, 0, 5, 130, 7, 7, 1], [0], [], [0, 0], [120] * 9 + [300] * 4], ids=str)
def test_users_with_unequal_numbers_of_rows(counts: list[int], two_threads: None) -> None:
    """The same bits as each user alone, by any number of threads."""
    for high, wide in ((1500, 64), (7, 5), (50, 1), (3, 70)):
        left, right = torch.randn(sum(counts), high), torch.randn(sum(counts), wide)
        written, squares = Ragged(left, right, counts, (high, wide)).squared_dense()
        assert squares is not None and len(squares) == len(counts)
        for user, some in enumerate(zip(left.split(counts), right.split(counts), strict=True)):
            alone, square = products(some[0][None], some[1][None])
            assert torch.equal(alone[0], written[user]) and torch.equal(square[0], squares[user])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needed
def test_few_rows_are_not_multiplied_and_one_user_with_more_is() -> None:
    left, right = sides(4, 30, 6, 5)
    left[:, 3:] = 0
    told, made = measured_products(left, right, reach=4.0)
    assert made is None and told[:, 1].tolist() == [3, 3, 3, 3]
    left[2, 3:] = 1
    told, made = measured_products(left, right, reach=4.0)
    assert made is not None and told[:, 1].tolist() == [3, 3, 30, 3]
    torch.testing.assert_close(made[0].double(), exactly(left, right), rtol=0, atol=2e-5)


@needed
def test_rows_of_padding_are_left_out_of_products(two_threads: None) -> None:
    """Before and after the others, on one side or both: the same bits; unless the other side is not a number there."""
    torch.set_num_threads(1)  # several threads measure first
    left, right = torch.randn(3, 9, 70), torch.randn(3, 9, 20)
    alone = measured_products(left, right, 0.0)
    long, wide = F.pad(left, (0, 0, 4, 130)), F.pad(right, (0, 0, 4, 130), value=2.0)
    padded = measured_products(long, wide, 0.0)
    assert torch.equal(padded[1][0], alone[1][0]) and torch.equal(padded[1][1], alone[1][1])
    assert np.array_equal(padded[0][:, :2], alone[0][:, :2])
    empty = measured_products(long * torch.tensor([1.0, 0.0, 1.0])[:, None, None], wide, 0.0)[1]
    assert not empty[0][1].any() and empty[1][1] == 0 and torch.equal(empty[0][2], alone[1][0][2])
    for strange in (float("nan"), float("inf")):
        wide[1, 140], wide[2, 0] = strange, strange
        found = measured_products(long, wide, 0.0)
        assert found[1][0].isnan().flatten(1).all(1).tolist() == [False, True, True]
        assert np.isnan(found[0][:, 0]).tolist() == [False, True, True]


@needed
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_rows_are_measured_as_in_torch(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are zero, very small, very large, or not numbers."""
    left, right = sides(5, 8, 33, 7)
    left[1] *= size
    left[2, 3], right[2, 5], left[3] = 0, 0, 0
    left[4, 0, 0] = float("nan")
    uses: list[Any] = [Outer(left, right, (33, 7)), Lookup(torch.randint(0, 9, (5, 8)), left.clone(), (9, 33))]
    for long in (None, torch.rand(40)):
        uses.append(Ragged(left.flatten(0, 1), right.flatten(0, 1), [3, 13, 0, 23, 1], (33, 7), long))
    many = [[use] for use in uses] + [list(uses)]
    ours = row_lengths(many)
    monkeypatch.setattr(native, "kernels", None)
    for one, other in zip(ours, row_lengths(many), strict=True):
        np.testing.assert_allclose(one.total, other.total, rtol=1e-6, atol=0)
        np.testing.assert_array_equal(one.count, other.count)
        np.testing.assert_array_equal(one.counts, other.counts)
        large = [[] if them.large is None else np.flatnonzero(them.large).tolist() for them in (one, other)]
        assert large[0] == large[1] and (size * 6 >= MOST or one.large is None)
    assert ours[0].large is None if size * 6 < MOST else ours[0].large.tolist() == [False, True, False, False, False]


@needed
def test_rows_that_are_zero_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = sides(4, 20, 5, 6)
    left[:, 4:], right[0, 1], left[3] = 0, 0, 0
    use = Outer(left, right, (5, 6))
    (short,) = without_zeros([use], row_lengths([[use]])[0])
    assert short.left.shape[1] == 4
    monkeypatch.setattr(native, "kernels", None)
    (other,) = without_zeros([use], row_lengths([[use]])[0])
    torch.testing.assert_close(short.dense(), other.dense(), rtol=0, atol=1e-6)


@needed
def test_reads_of_a_table() -> None:
    """Rows that read the same entry cancel or add up; alone and on top of a product."""
    ids, grad = torch.randint(0, 12, (6, 40)), torch.randn(6, 40, 512)
    ids[0], ids[1] = 3, torch.arange(40) % 20
    grad[1, 20:] = -grad[1, :20]
    use = Lookup(ids, grad, (20, 512))
    exact = torch.zeros(6, 20, 512, dtype=torch.float64)
    for user in range(6):
        exact[user].index_add_(0, ids[user], grad[user].double())
    torch.testing.assert_close(use.squares(), exact.square().sum((1, 2)), rtol=1e-12, atol=1e-12)
    left, right = torch.randn(6, 30, 20), torch.randn(6, 30, 512)
    written, squares = norms.squared_gradients([Outer(left, right, (20, 512)), use])
    torch.testing.assert_close(written.double(), exactly(left, right) + exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(squares, (exactly(left, right) + exact).square().sum((1, 2)), rtol=1e-5, atol=0)


@needed
def test_squares_are_taken_anew_where_a_table_cancels_the_product() -> None:
    """What is left is a millionth of the product: its squares must not come from a difference."""
    left, right = torch.ones(1, 1, 20), torch.randn(1, 1, 512)
    lookup = Lookup(torch.arange(20)[None], -right.expand(1, 20, 512) * (1 - 1e-6), (20, 512))
    written, squares = norms.squared_gradients([Outer(left, right, (20, 512)), lookup])
    torch.testing.assert_close(squares, written.double().square().sum((1, 2)), rtol=1e-6, atol=0)


@needed
def test_layer_norm_of_users() -> None:
    """Away from zero, a constant row, odd widths: against float64."""
    for width in (3, 16, 77):
        model, batch = _Normed(width), (20 + torch.randn(5, 9, width),)
        batch[0][0, 0] = 4.0
        found = engine(model, batch, dp.clip(1.0))
        truth = one_at_a_time(model.double(), (batch[0].double(),))
        torch.testing.assert_close(found.double(), norms_of(truth), rtol=1e-4, atol=0)


class _Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum((1, 2)) + self.norm(x).sum((1, 2))


@needed
def test_wrong_arrays_are_refused() -> None:
    """A size that does not fit is an error, never a write beyond the end."""
    kernels = native.kernels
    assert kernels is not None
    single, double = np.zeros((2, 3, 4), dtype=np.float32), np.zeros((2, 3, 4))
    words, places = np.zeros(512, dtype=np.int64), np.zeros((3, 600), dtype=np.int64)
    frozen = single[:, 0].copy()
    frozen.flags.writeable = False
    ragged = np.zeros((2, 4, 4), dtype=np.float32), np.zeros(2)
    limits = (1000.0, 0.01, 3.9, 8192.0, 1.0, 1.0)
    sums, values = np.zeros(600, dtype=np.float32), np.zeros(600, dtype=np.float32)
    pieces, empty = [(sums.ctypes.data, 512)], (np.empty((0, 2, 3)), np.empty((0, 2)))
    wrong = [
        (kernels.release, (words, pieces, places, values, 513, 0, *limits)),
        (kernels.release, (words, pieces, places, values, -1, 0, *limits)),
        (kernels.release, (words, pieces, places, values, 0, 513, *limits)),
        (kernels.release, (words, pieces, places, values, 0, -1, *limits)),
        (kernels.release, (words[:511], pieces, places, values, 0, 0, *limits)),
        (kernels.release, (words, pieces, places[:, :1].copy(), values, 0, 0, *limits)),
        (kernels.release, (words, pieces, places, values[:511], 0, 0, *limits)),
        (kernels.release, (words, pieces, places, values.view(np.int32), 0, 0, *limits)),
        (kernels.release, (words, [(sums.ctypes.data, 0)], places, values, 0, 0, *limits)),
        (kernels.release, (words, [(sums.ctypes.data, 2**62)] * 3, places, values, 0, 0, *limits)),
        (kernels.release, (words, [sums], places, values, 0, 0, *limits)),
        (kernels.release, (words, pieces, places, values, 2**63 - 1 - 256, 0, *limits)),
        (kernels.release, (words.view(np.float64), pieces, places, values, 0, 0, *limits)),
        (kernels.measure_uses, ([], [(torch.zeros(2, 2), 2**63 - 2, 2)], torch.zeros(2, 2), 2, 0, 2, *empty)),
        (kernels.measure_uses, ([], [(torch.zeros(2, 2), 0, 1)], torch.zeros(2, 2), 2, 0, 2, *empty)),
        (kernels.measure_uses, ([], [(torch.zeros(2, 2), 1, 2)], torch.zeros(2, 2), 2, 0, 2, *empty)),
        (kernels.measure_uses, ([], [(torch._efficientzerotensor(2, 2), 0, 2)], torch.zeros(2, 2), 2, 0, 2, *empty)),
        (kernels.measure_uses, ([], [], None, 2, 1, 3, *empty)),
        (kernels.add_sums, ([(torch.zeros(2, 3), torch.zeros(4), True)], torch.zeros(2), 0, 1)),
        (kernels.add_sums, ([(torch.zeros(2, 3), torch.zeros(3), True)], torch.zeros(2), 2**62, 2**63 - 1)),
        (kernels.add_sums, ([(torch.zeros(2, 6)[:, ::2], torch.zeros(3), True)], torch.zeros(2), 0, 1)),
        (kernels.put, (pieces, np.array([512]), np.zeros(1, dtype=np.float32))),
        (kernels.put, (pieces, np.array([-1]), np.zeros(1, dtype=np.float32))),
        (kernels.put, (pieces, np.array([3, 2]), np.zeros(2, dtype=np.float32))),
        (kernels.put, (pieces, np.array([3]), np.zeros(2, dtype=np.float32))),
        (kernels.put, ([], np.array([0]), np.zeros(1, dtype=np.float32))),
        (kernels.hash_words, ([(0, 9)], np.zeros((2, 4), dtype=np.int32), np.zeros((2, 2), dtype=np.int64), 4)),
        (kernels.hash_words, ([(0, 4)], np.zeros((2, 4), dtype=np.int32), np.zeros((2, 2)), 4)),
        (kernels.hash_words, ([words], np.zeros((2, 4), dtype=np.int32), np.zeros((2, 2), dtype=np.int64), 4)),
        (kernels.sums_of_words, ([(0, -1)],)),
        (kernels.sums_of_words, ([single],)),
        (kernels.sums_of_words, (single,)),
        (kernels.write_products, (single.view(np.int32), single, np.zeros((2, 4, 4), dtype=np.float32), np.zeros(2))),
        (kernels.write_products, (single.astype(">f4"), single, np.zeros((2, 4, 4), dtype=np.float32), np.zeros(2))),
        (kernels.write_products, (*[np.empty((1, 0, 1 << 31), dtype=np.float32)] * 2, single[:0], np.zeros(1))),
        (kernels.pack_rows, (single[:, :0], np.empty((2, 0, 1 << 38), dtype=np.float32), single, single[:0])),
        (kernels.square_by_gram, (*[np.broadcast_to(np.float32(1), (1, 1 << 31, 1))] * 2, np.zeros(1))),
        (kernels.squares_of_rows, ([single], np.zeros(5))),
        (kernels.squares_of_rows, ([single], np.zeros(7))),
        (kernels.squares_of_rows, ([double], np.zeros(6))),
        (kernels.squares_of_rows, ([single[..., ::2]], np.zeros(6))),
        (kernels.measure_rows, ([single], [single[:, :2]], np.zeros((1, 2, 3)))),
        (kernels.measure_rows, ([single], [None], np.zeros((1, 3, 3)))),
        (kernels.measure_rows, ([single], [], np.zeros((1, 2, 3)))),
        (kernels.write_products, (single, single[:1], np.zeros((2, 4, 4), dtype=np.float32), np.zeros(2))),
        (kernels.write_products, (single, single, np.zeros((2, 4, 5), dtype=np.float32), np.zeros(2))),
        (kernels.write_products, (single, single, np.zeros((2, 4, 4)), np.zeros(2))),
        (kernels.write_products, (single, single, np.zeros((2, 4, 4), dtype=np.float32), np.zeros(3))),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([1, 1]), *ragged, 0, 2)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([1, 3]), *ragged, 0, 2)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([4, -1]), *ragged, 0, 2)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([2**62, 2**62]), *ragged, 0, 2)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([1, 2]), *ragged, 0, 3)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([1, 2]), *ragged, -1, 2)),
        (kernels.write_ragged, (single[0], single[0, :2], np.array([1, 2]), *ragged, 0, 2)),
        (kernels.write_ragged, (*[single[0]] * 2, np.array([1, 2]), ragged[0], np.zeros(3), 0, 2)),
        (kernels.write_ragged, (*[single] * 2, np.array([1, 2]), *ragged, 0, 2)),
        (kernels.square_by_gram, (single, single, np.zeros(3))),
        (kernels.square_by_gram, (single[0], single[0], np.zeros(3))),
        (kernels.pack_rows, (single + 1, single + 1, single[:, :2].copy(), single[:, :2].copy())),
        (kernels.square_lookups, (np.zeros((2, 2), dtype=np.int64), single, np.zeros(2))),
        (kernels.add_lookups, (np.full((2, 3), 3), single, np.zeros((2, 3, 4), dtype=np.float32), np.zeros(2))),
        (kernels.add_lookups, (np.full((2, 3), -1), single, np.zeros((2, 3, 4), dtype=np.float32), np.zeros(2))),
        (kernels.norm_sums, (single, single, single[..., 0].copy(), single[..., 0].copy(), frozen, frozen)),
        (kernels.norm_sums, (single, single, *[single[..., 1:].copy()] * 2, *[single[:, 0].copy()] * 2)),
        (kernels.relu_variances, (single[0], single[1, :2].copy(), single[0].copy())),
        (kernels.relu_variances, (single[0], single[1], single[0, :2].copy())),
        (kernels.relu_variances, (single[0], double[1], single[0].copy())),
        (kernels.relu_variances, (single[0], single[1], frozen)),
        (kernels.norm_variances, (single[0], single[1, :2], single[0, 0].copy(), single[0].copy(), 1.0, 1.0, 1.0)),
        (kernels.norm_variances, (single[0], single[1], single[0, 0, 1:].copy(), single[0].copy(), 1.0, 1.0, 1.0)),
        (kernels.norm_variances, (single[0], single[1], single[0, 0].copy(), single.copy(), 1.0, 1.0, 1.0)),
        (kernels.norm_variances, (single, single, single[0, 0].copy(), single.copy(), 1.0, 1.0, 1.0)),
        (kernels.norm_variances, (single[0], single[1], single[0, 0].copy(), single[0].copy(), 1.0, 1.0, None)),
        (kernels.norm_sums, (single, single[..., :2], *[single[..., 0].copy()] * 2, *[single[:, 0].copy()] * 2)),
    ]
    of_tensors = (kernels.measure_uses, kernels.add_sums)  # which an older torch does not let compiled code read
    for function, arguments in wrong:
        if function in of_tensors and not native.reads_tensors():
            continue
        with pytest.raises((ValueError, TypeError, BufferError)):
            function(*arguments)


def test_other_devices_and_precisions_do_without() -> None:
    assert not can_multiply(torch.zeros(1, 2, 3).double(), torch.zeros(1, 2, 3).double())
    assert not can_multiply(torch.zeros(1, 2, 3, device="meta"), torch.zeros(1, 2, 3, device="meta"))
