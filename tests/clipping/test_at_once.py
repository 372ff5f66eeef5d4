"""Linear layers that take the short way: against the long one, and against one user at a time in float64."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping.batched_norms import AffineCall
from dpformer.kernels import native
from dpformer.kernels.products import add_sums
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums

needed = pytest.mark.skipif(not native.reads_tensors(), reason="nothing was compiled, or torch has no C interface")
B, T, D = 5, 12, 8


class Layers(nn.Module):
    """Linear layers of both kinds, some frozen in part, one used twice, one of whose inputs is flat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(D, D), nn.Linear(D, 40, bias=False), nn.Linear(40, 3)
        self.twice, self.weight_only, self.bias_only = nn.Linear(3, 3), nn.Linear(3, D), nn.Linear(D, 6)
        self.weight_only.bias.requires_grad_(False)
        self.bias_only.weight.requires_grad_(False)
        self.columns, self.shift = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.narrow(torch.relu(self.wide(x))))
        x = self.weight_only(self.twice(torch.tanh(self.twice(x))))
        x = torch.tanh(self.bias_only(x))
        flat = torch.addmm(self.shift, x.view(-1, 6), self.columns)
        return flat.view(len(x), -1).square().mean(1)


def made(seed: int = 0, few: bool = False) -> tuple[Layers, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(B, T, D)
    if few:
        x[1, 2:] = 0
    return Layers(), x


def run(model: nn.Module, x: Tensor, **options: bool) -> tuple[Tensor, list[Tensor], list[Any]]:
    clipping = dp.PhantomClipping(model, **options)
    model.zero_grad()
    with clipping.users(x) as user:
        losses = model(user)
    kinds = [type(call) for call in clipping._gate.calls]
    return clipping.backward(losses, dp.clip(0.5)), [g.clone() for g in sums(model)], kinds


@needed
def test_plain_layers_take_the_short_way() -> None:
    model, x = made()
    kinds = run(model, x)[2]
    assert kinds.count(AffineCall) == len(kinds) == 8


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("few", [False, True])
def test_against_float64(self_check: bool, threads: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(few=few)
    before = torch.get_num_threads()
    monkeypatch.setattr("dpformer.kernels.products.LARGE", 1)  # so that several threads share the work
    torch.set_num_threads(threads)
    try:
        norms, ours, _ = run(model, x, self_check=self_check)
    finally:
        torch.set_num_threads(before)
    truth = one_at_a_time(model.double(), (x.double(),))
    torch.testing.assert_close(norms.double(), norms_of(truth), rtol=1e-6, atol=0)
    assert relative_error(ours, clipped_sum(truth, dp.clip(0.5))) < 1e-5


@needed
@pytest.mark.parametrize(("keep", "waiting"), [(1 << 20, 1 << 20), (300, 1 << 20), (1, 1), (1 << 20, 1)])
def test_room_and_waiting_change_no_norm(keep: int, waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    norms, ours, _ = run(model, x)
    monkeypatch.setattr("dpformer.clipping.parameter_norms.KEEP", keep)
    monkeypatch.setattr("dpformer.clipping.norm_accumulator.WAITING", waiting)
    again, theirs, _ = run(model, x, self_check=False)
    torch.testing.assert_close(again, norms, rtol=1e-6, atol=0)
    assert relative_error(theirs, ours) < 1e-6


@needed
@pytest.mark.parametrize("change", ["input", "weight"])
def test_what_a_layer_read_must_not_be_written_to(change: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            kept = h * 1.0
            y = self.b(kept)
            if change == "input":
                kept.mul_(2)
            return y.square().sum((1, 2))

    model = Writes()
    clipping = dp.PhantomClipping(model)
    with clipping.users(torch.randn(B, T, D)) as user:
        losses = model(user)
    if change == "weight":
        with torch.no_grad():
            model.b.weight.mul_(2)
    with pytest.raises((dp.UnsupportedUse, RuntimeError), match=r"changed in place|modified by an inplace"):
        clipping.backward(losses, dp.clip(1.0))


@needed
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_strange_user_counts_for_nothing_or_for_c(bad: float) -> None:
    model, x = made()
    x[2] = bad
    clipping = dp.PhantomClipping(model, self_check=False)
    with clipping.users(x) as user:
        losses = model(user)
    norms = clipping.backward(losses, dp.clip(0.5))
    ours = sums(model)
    assert all(bool(g.isfinite().all()) for g in ours)
    if not np.isfinite(bad):
        assert clipping.skipped_users == 1
        rest = torch.cat([x[:2], x[3:]])
        truth = one_at_a_time(model.double(), (rest.double(),))
        assert relative_error(ours, clipped_sum(truth, dp.clip(0.5))) < 1e-5
    assert int(norms.isfinite().sum()) >= B - 1


@needed
@pytest.mark.parametrize(
    "context", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)], ids=["no_grad", "autocast"]
)
def test_other_conditions_take_the_long_way(context: Any) -> None:
    layer = nn.Linear(D, D)
    clipping = dp.PhantomClipping(layer)
    try:
        with clipping.users(torch.randn(B, D)) as user:
            x = torch.relu(user)
            with context():
                F.linear(x, layer.weight, layer.bias)
            assert not any(type(call) is AffineCall for call in clipping._gate.calls)
    except dp.UnsupportedUse as error:
        assert "no_grad" in str(error)


@needed
@pytest.mark.parametrize("users", [1, 7, 8, 9, 64, 65, 200])
@pytest.mark.parametrize("numbers", [1, 5, 8191, 8193])
def test_sums_of_users(users: int, numbers: int) -> None:
    written, c, out = torch.randn(users, numbers), torch.rand(users), torch.randn(numbers)
    truth = c.double() @ written.double()
    size = (c.double() @ written.double().abs()).max()
    for adds in (True, False):
        ours = out.clone()
        add_sums([(written, ours, adds)], c)
        assert float((ours - (truth + out if adds else truth)).abs().max()) < 3e-7 * float(size + 1)


@needed
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpformer.kernels.products.LARGE", 1)
    written, c, before = torch.randn(19, 20_011), torch.rand(19), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.zeros(20_011)
            add_sums([(written, out, False)], c)
            found.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needed
def test_many_users_lose_little() -> None:
    """All the same: added up one after the other in float32, a thousand of them would be off by 10⁻⁵."""
    written, out = torch.full((1000, 3), 0.1), torch.empty(3)
    add_sums([(written, out, False)], torch.full((1000,), 0.7))
    truth = 1000 * float(written[0, 0].double()) * float(torch.tensor(0.7).double())
    assert abs(float(out[0]) / truth - 1) < 1e-6


@needed
def test_engine_and_naive_agree_after_many_steps() -> None:
    model, x = made(seed=3)
    for _ in range(3):
        engine(model, (x,), dp.normalize(1.0))
    truth = one_at_a_time(model.double(), (x.double(),))
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-5


@pytest.mark.parametrize("self_check", [True, False])
def test_a_bias_of_one_number_is_added_to_every_output(self_check: bool) -> None:
    """addmm broadcasts it: its gradient is the sum over all outputs (an attack found only the first one)."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(4, 6), nn.Linear(5, 3)
            self.weight, self.shift = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x * 1.0))
            return self.c(torch.addmm(self.shift, h, self.weight).tanh()).square().sum(1)

    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(7, 4)
    norms, ours, _ = run(model, x, self_check=self_check)
    truth = one_at_a_time(model.double(), (x.double(),))
    torch.testing.assert_close(norms.double(), norms_of(truth), rtol=1e-6, atol=0)
    assert relative_error(ours, clipped_sum(truth, dp.clip(0.5))) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_linear_layer_whose_bias_is_one_number() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(x), self.weight, self.shift).square().sum(1)

    model, x = Shifted().double(), torch.randn(3, 4, dtype=torch.float64)
    truth = one_at_a_time(model, (x,))
    torch.testing.assert_close(engine(model, (x,), dp.clip(0.5)), norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-9


@needed
def test_a_gradient_that_is_added_to_counts_its_writes() -> None:
    """So that autograd, and code that keeps `p.grad`, sees that it was written to."""
    model, x = made()
    clipping = dp.PhantomClipping(model)
    for _ in range(2):
        before = model.wide.weight.grad
        version = None if before is None else before._version
        with clipping.users(x) as user:
            losses = model(user)
        clipping.backward(losses, dp.clip(1.0))
    assert before is not None and before is model.wide.weight.grad and version is not None
    assert before._version > version
