"""Whose row is it: packed rows that a layer flattens, rows picked by a mask, and mixing that begins late.

Every model here was once clipped wrongly without a word, on the first batch or on a later one.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import proof
from tests.clipping.naive import clipped_sum, norms_of, relative_error, sums
from tests.clipping.problems import per_user

D = 6


def step(clipping: dp.PhantomClipping, losses_of, *batch: Tensor) -> Tensor:
    with clipping:
        losses = losses_of(*batch)
    return clipping.backward(losses, dp.clip(0.5))


class Conv1D(nn.Module):
    """As Hugging Face's: everything before the last dimension becomes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(x.shape)


@pytest.mark.parametrize("user", [[0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]])
def test_packed_documents_that_a_layer_flattens(user: list[int]) -> None:
    """Four documents of two users, three tokens each: 12 rows are three times 4, not six a user."""
    torch.manual_seed(0)
    model, index = Conv1D().double(), torch.tensor(user)
    x = torch.randn(4, 3, D, dtype=torch.float64)

    def losses_of(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(2, dtype=x.dtype).index_add(0, index, per_user(torch.tanh(model(x))))

    for clipping in (dp.PhantomClipping(model, proof=False), dp.PhantomClipping(model)):
        model.zero_grad()
        with clipping, clipping.packed(index):
            losses = losses_of(x, index)
        norms = clipping.backward(losses, dp.clip(0.5))
        parameters = list(model.parameters())
        truth = [list(torch.autograd.grad(losses_of(x[index == u], index[index == u])[u], parameters)) for u in (0, 1)]
        torch.testing.assert_close(norms, norms_of(truth), rtol=1e-12, atol=0)
        assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-12


def test_packed_rows_that_become_something_else() -> None:
    """Seven rows of three users: 12 rows are neither those nor one a user."""
    model, index = nn.Linear(D, D), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    clipping = dp.PhantomClipping(model)
    x, other = torch.randn(7, D), torch.randn(12, D)
    with clipping, clipping.packed(index):
        losses = torch.zeros(3).index_add(0, index, per_user(model(x))) + per_user(model(other)).sum() / 12
    with pytest.raises(dp.UnsupportedUse, match=r"sees 12 rows inside `clipping.packed`"):
        clipping.backward(losses, dp.clip(0.5))


def test_rows_of_users_inside_packed() -> None:
    """A head on one pooled row a user, beside packed rows."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, 1)]).double()
    index, x = torch.tensor([1, 0, 0, 2, 0]), torch.randn(5, D, dtype=torch.float64)

    def losses_of(x: Tensor, index: Tensor) -> Tensor:
        pooled = torch.zeros(3, D, dtype=x.dtype).index_add(0, index, torch.tanh(model[0](x)))
        return per_user(model[1](pooled))

    clipping = dp.PhantomClipping(model)
    with clipping, clipping.packed(index):
        losses = losses_of(x, index)
    norms = clipping.backward(losses, dp.clip(0.5))
    parameters = list(model.parameters())
    truth = [list(torch.autograd.grad(losses_of(x, index)[u], parameters)) for u in range(3)]
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-12, atol=0)


def test_as_many_packed_rows_as_users_are_proven_every_time() -> None:
    """Pooled rows that look like packed ones: equal to them in the first batch only."""
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def losses_of(x: Tensor, index: Tensor) -> Tensor:
        pooled = torch.zeros(4, D).index_add(0, index, torch.tanh(model[0](x)))
        return per_user(model[1](pooled))

    clipping = dp.PhantomClipping(model)
    for index, right in ((torch.arange(4), True), (torch.tensor([3, 0, 1, 0]), False)):
        with clipping, clipping.packed(index):
            losses = losses_of(torch.randn(4, D), index)
        if right:
            clipping.backward(losses, dp.clip(0.5))
        else:
            with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
                clipping.backward(losses, dp.clip(0.5))


# Rows picked by a mask.


def masked_losses(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    user = torch.arange(len(x))[:, None].expand_as(mask)[mask]
    return torch.zeros(len(x)).index_add(0, user, per_user(torch.tanh(model[1](torch.tanh(model[0](x))[mask]))))


def right_or_refused(clipping: dp.PhantomClipping, model: nn.Module, losses_of) -> None:
    """The norms are those of autograd, user by user; anything else must have been refused."""
    try:
        norms = step(clipping, losses_of)
    except dp.UnsupportedUse:
        return
    losses, parameters = losses_of(), [p for p in model.parameters() if p.requires_grad]
    truth = [list(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-3, atol=1e-6)


def two_layers(users: int, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.ModuleList, dp.PhantomClipping, Tensor]:
    """A model, an engine that proves nothing at random, and users of three rows."""
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    clipping = dp.PhantomClipping(model)
    monkeypatch.setattr(clipping, "_due", lambda: False)
    return model, clipping, torch.randn(users, 3, D)


def test_a_mask_that_is_even_in_the_first_batch_only() -> None:
    """Then one user has 8 rows of 16, and would contribute up to 8 C."""
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    clipping = dp.PhantomClipping(model)
    x, even = torch.randn(4, 8, D), torch.arange(8).expand(4, 8) < 4
    uneven = torch.arange(8).expand(4, 8) < torch.tensor([8, 4, 2, 2])[:, None]
    for mask in (even, uneven):
        right_or_refused(clipping, model, lambda mask=mask: masked_losses(model, x, mask))


@pytest.mark.parametrize(
    "pick",
    [
        lambda h, mask: h[mask],
        lambda h, mask: h.flatten(0, 1)[mask.flatten()],
        lambda h, mask: h.flatten(0, 1)[mask.flatten().nonzero()[:, 0]],
        lambda h, mask: h.flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0]),
        lambda h, mask: torch.masked_select(h, mask[:, :, None]).view(-1, D),
    ],
    ids=["mask", "flat mask", "index", "index_select", "masked_select"],
)
def test_two_unequal_users_among_32(pick) -> None:
    """Two users were looked at, the largest ones; the two that were wrong are others."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    x, mask = torch.randn(32, 8, D), (torch.arange(8).expand(32, 8) < 4).clone()
    mask[5, 4], mask[6, 3] = True, False
    user = torch.arange(32)[:, None].expand(32, 8)[mask]
    x[5], x[6] = 0.01 * x[5], 0.01 * x[6]

    def losses_of() -> Tensor:
        rows = pick(torch.tanh(model[0](x)), mask)
        return torch.zeros(32).index_add(0, user, per_user(torch.tanh(model[1](rows))))

    right_or_refused(dp.PhantomClipping(model), model, losses_of)


SPELLINGS = {
    "index_select by name": lambda h, rows: torch.index_select(h, dim=0, index=rows),
    "index by name": lambda h, rows: h.index_select(0, index=rows),
    "all by name": lambda h, rows: torch.index_select(input=h, index=rows, dim=-2),
    "list": lambda h, rows: h[rows.tolist()],
    "array": lambda h, rows: h[rows.numpy()],
    "embedding": lambda h, rows: F.embedding(rows, h),
    "embedding by name": lambda h, rows: F.embedding(weight=h, input=rows),
    "gather": lambda h, rows: h.gather(0, rows[:, None].expand(-1, D)),
    "gather by name": lambda h, rows: torch.gather(h, dim=0, index=rows[:, None].expand(-1, D)),
    "take_along_dim": lambda h, rows: h.take_along_dim(rows[:, None], 0),
    "take": lambda h, rows: h.take(rows[:, None] * D + torch.arange(D)),
    "list of tensors": lambda h, rows: h[[rows]],
    "dots": lambda h, rows: h[..., rows, :],
}


@pytest.mark.parametrize("pick", SPELLINGS.values(), ids=SPELLINGS)
def test_an_index_that_takes_all_rows_in_the_first_batch_only(pick, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written; the first batch was proven, and the next one would have been found once in 128 times."""
    model, clipping, x = two_layers(4, monkeypatch)

    def losses_of(counts: Tensor) -> Tensor:
        mask = torch.arange(3) < counts[:, None]
        rows = mask.flatten().nonzero()[:, 0]
        hidden = torch.tanh(model[1](pick(torch.tanh(model[0](x)).flatten(0, 1), rows)))
        return torch.zeros(4).index_add(0, rows // 3, per_user(hidden))

    for counts in (torch.tensor([3, 3, 3, 3]), torch.tensor([3, 3, 1, 1])):
        right_or_refused(clipping, model, lambda counts=counts: losses_of(counts))


def test_einsum_time_first() -> None:
    """Its letters say which dimension is which, so nothing is turned back for it."""
    model, x = nn.Linear(D, D), torch.randn(4, 3, D)

    def losses_of(x: Tensor) -> Tensor:
        hidden = torch.einsum("tbd,ed->tbe", torch.tanh(x).transpose(0, 1), model.weight) + model.bias
        return per_user(hidden.transpose(0, 1).square())

    norms = step(dp.PhantomClipping(model), losses_of, x)
    truth = [list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)) for loss in losses_of(x)]
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-5, atol=1e-7)


def test_the_last_step_gathered_time_first() -> None:
    """Each number stays with its user, so nothing is picked."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor, last: Tensor) -> Tensor:
            hidden = self.a(x).transpose(0, 1)
            return per_user(self.b(hidden.gather(0, last[None, :, None].expand(1, -1, D))[0]))

    model, x, last = Last(), torch.randn(4, 3, D), torch.tensor([2, 0, 1, 2])
    norms = step(dp.PhantomClipping(model), model, x, last)
    truth = [list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)) for loss in model(x, last)]
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-5, atol=1e-7)


def test_the_proof_alone_finds_two_unequal_users_among_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is lost whose the rows are, the random weights see every user."""
    from dpformer.clipping import picked

    monkeypatch.setattr(picked, "picked", lambda t: None)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    x, mask = torch.randn(32, 8, D), (torch.arange(8).expand(32, 8) < 4).clone()
    mask[5, 4], mask[6, 3] = True, False
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        step(dp.PhantomClipping(model), lambda x, mask: masked_losses(model, x, mask), x, mask)


def test_users_sorted_by_length() -> None:
    """Sorted in the first batch, so that sorting does nothing; not in the next."""
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    clipping, x = dp.PhantomClipping(model), torch.randn(4, 3, D)

    def losses_of(length: Tensor) -> Tensor:
        order = length.argsort(descending=True)
        hidden = torch.tanh(model[1](torch.tanh(model[0](x))[order]))
        return per_user(hidden[order.argsort()])

    for length in (torch.tensor([4, 3, 2, 1]), torch.tensor([1, 3, 2, 4])):
        right_or_refused(clipping, model, lambda length=length: losses_of(length))


def test_samples_picked_by_an_index_are_a_batch() -> None:
    """As in every training loop: `model(data[users])`."""
    model, data = nn.Linear(D, D), torch.randn(9, 3, D)
    for users in (torch.tensor([4, 2, 7]), torch.tensor([0, 8, 5, 1])):
        norms = step(dp.PhantomClipping(model, proof=False), lambda users: per_user(model(data[users])), users)
        truth = [
            list(torch.autograd.grad(per_user(model(data[u : u + 1]))[0], list(model.parameters()))) for u in users
        ]
        torch.testing.assert_close(norms, norms_of(truth), rtol=1e-5, atol=0)


# Mixing that begins late, or concerns few.


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixes = nn.Linear(D, D), False

    def forward(self, x: Tensor) -> Tensor:
        each = per_user(self.linear(x))
        return torch.cat([each[:-1], each[-1:] + each[:1]]) if self.mixes else each


def test_mixing_that_begins_late_is_found_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Late()
    clipping = dp.PhantomClipping(model)
    step(clipping, model, torch.randn(16, D))
    model.mixes = True
    monkeypatch.setattr(proof, "EVERY", 4)
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        for _ in range(200):  # (3/4)^200: never missed
            step(clipping, model, torch.randn(16, D))


def test_random_proofs_are_rare_and_come() -> None:
    assert proof.EVERY >= 100  # each costs about a batch: one in a hundred
    assert 0 < sum(proof.due() for _ in range(100 * proof.EVERY)) < 300


@pytest.mark.parametrize("few", [1e-3, 1.0])
def test_one_user_of_many_who_sees_another(few: float) -> None:
    """Their gradient is small, and normalised it counts as much as any."""
    torch.manual_seed(0)
    model = nn.Linear(D, D)

    def losses_of(x: Tensor) -> Tensor:
        each = per_user(model(x)) * torch.where(torch.arange(64) == 40, few, 1.0)
        return each + (torch.arange(64) == 40) * few * 0.5 * each[3]

    clipping = dp.PhantomClipping(model)
    with clipping:
        losses = losses_of(torch.randn(64, D))
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        clipping.backward(losses, dp.normalize(1.0, gamma=1e-6))


def test_a_proof_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded runs are the same to the last bit, proven or not: also with dropout, whose random numbers are torch's."""
    outcomes = []
    for every in (1, 1 << 30):
        monkeypatch.setattr(proof, "EVERY", every)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 40), nn.Dropout(0.5), nn.Linear(40, D))
        clipping = dp.PhantomClipping(model)
        for _ in range(5):
            step(clipping, lambda x, model=model: per_user(model(x)), torch.randn(8, 3, D))
        outcomes.append([*sums(model), torch.rand(1)])
    assert all(map(torch.equal, *outcomes))


def test_batches_that_never_prove_anything() -> None:
    model, x = nn.Linear(D, D), torch.randn(4, D)
    x[1] = float("nan")
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match=f"{proof.PATIENCE} batches in a row"):
        for _ in range(proof.PATIENCE):
            step(clipping, lambda x: per_user(model(x)), x)


# Second derivatives.


def penalty(model: nn.Module, x: Tensor, create: bool) -> Tensor:
    x = x.clone().requires_grad_()
    out = per_user(torch.tanh(model(x)))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=create, retain_graph=True)
    return out + slope.square().sum(1)


def test_a_gradient_penalty() -> None:
    """Norms up to 97% off: the parameter is cut out of the graph that is differentiated again."""
    model = nn.Linear(D, D)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match="create_graph=True"), clipping:
        penalty(model, torch.randn(4, D), create=True)
    step(clipping, lambda x: penalty(model, x, create=False), torch.randn(4, D))  # a constant: nothing is lost


def test_a_gradient_penalty_on_hidden_states() -> None:
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def losses_of(x: Tensor) -> Tensor:
        hidden = model[0](x)
        out = per_user(torch.tanh(model[1](hidden)))
        (slope,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
        return out + slope.square().sum(1)

    with pytest.raises(dp.UnsupportedUse, match="create_graph=True"):
        step(dp.PhantomClipping(model), losses_of, torch.randn(4, D))


def test_a_backward_with_create_graph() -> None:
    model = nn.Linear(D, D)

    def losses_of(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = per_user(model(x))
        out.sum().backward(create_graph=True)
        assert x.grad is not None
        return out + x.grad.square().sum(1)

    with pytest.raises(dp.UnsupportedUse, match="create_graph=True"):
        step(dp.PhantomClipping(model), losses_of, torch.randn(4, D))


def test_a_functional_gradient() -> None:
    model = nn.Linear(D, D)

    def losses_of(x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: per_user(torch.tanh(model(x))).sum())(x)
        return slope.square().sum(1)

    with pytest.raises((dp.UnsupportedUse, RuntimeError)):
        step(dp.PhantomClipping(model), losses_of, torch.randn(4, D))


# What the forward pass leaves behind.


class Keeps(nn.Module):
    def __init__(self, keep) -> None:
        super().__init__()
        self.keep, self.linear = keep, nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return per_user(self.linear(x - self.mean.detach().clone()))


def reassign(m: nn.Module, x: Tensor) -> None:
    m.mean = 0.9 * m.mean + x.mean(0)


@pytest.mark.parametrize(
    "keep",
    [
        reassign,
        lambda m, x: m.mean.data.copy_(x.mean(0)),
        lambda m, x: setattr(m.mean, "data", x.mean(0)),
        lambda m, x: m.mean[:2].copy_(x.mean(0)[:2]),
        lambda m, x: m.mean.numpy().__setitem__(0, float(x.mean())),
        lambda m, x: m.linear.weight.data.mul_(0.99),
        lambda m, x: m.register_buffer("queue", x.clone()),
    ],
    ids=["reassigned", "data", "data=", "view", "numpy", "parameter", "new buffer"],
)
def test_what_the_forward_pass_keeps_in_the_model(keep) -> None:
    model = Keeps(keep)
    with pytest.raises(dp.UnsupportedUse, match=r"in the forward pass|buffer of the model"):
        step(dp.PhantomClipping(model), model, torch.randn(4, D))
    assert model.linear.weight.grad is None


def test_a_buffer_of_public_numbers_may_be_made_anew() -> None:
    """A cache of positions that grows, as rotary embeddings have."""

    def grow(m: nn.Module, x: Tensor) -> None:
        m.mean = torch.zeros(D) + torch.arange(D)

    model = Keeps(grow)
    assert step(dp.PhantomClipping(model), model, torch.randn(4, D)).shape == (4,)


def test_the_engine_goes_on_after_a_model_was_changed() -> None:
    model = Keeps(lambda m, x: m.mean.data.add_(1))
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse):
        step(clipping, model, torch.randn(4, D))
    model.keep = lambda m, x: None
    step(clipping, model, torch.randn(4, D))
    F.linear(torch.randn(2, D), model.linear.weight).sum().backward()
