"""Rows that change places: in order in the first batches, which are proven, and in another order later.

Most of these once had wrong norms then, without a word, for 128 batches on average.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import engine, proof
from tests.clipping.problems import per_user
from tests.clipping.test_layouts import D, right_or_refused, step, two_layers


def put(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for place, user in enumerate(order.tolist()):
        out[place] = h[user]
    return out


def onehot(h: Tensor, order: Tensor) -> Tensor:
    return F.one_hot(order, len(order)).to(h.dtype)


REORDERS = {
    "stack": lambda h, order: torch.stack([h[i] for i in order.tolist()]),
    "stack of slices": lambda h, order: torch.stack([h[i : i + 1, ...][0] for i in order.tolist()]),
    "cat": lambda h, order: torch.cat([h[i : i + 1] for i in order.tolist()]),
    "iterate": lambda h, order: torch.stack([row for _, row in sorted(zip(order.argsort().tolist(), h, strict=True))]),
    "unbind": lambda h, order: torch.stack([h.unbind()[i] for i in order.tolist()]),
    "split": lambda h, order: torch.cat([h.split(1, dim=-3)[i] for i in order.tolist()]),
    "chunk": lambda h, order: torch.cat([torch.chunk(h, len(h))[i] for i in order.tolist()]),
    "tensor_split": lambda h, order: torch.cat([h.tensor_split(len(h))[i] for i in order.tolist()]),
    "select": lambda h, order: torch.stack([h.select(dim=0, index=i) for i in order.tolist()]),
    "narrow": lambda h, order: torch.cat([h.narrow(0, i, 1) for i in order.tolist()]),
    "key of a tensor": lambda h, order: torch.stack([h[i] for i in order]),
    "written": put,
    "flip": lambda h, order: h.flip(0) if order[0] else h,
    "flip by name": lambda h, order: torch.flip(h, dims=(-3, 1)).flip(1) if order[0] else h,
    "roll": lambda h, order: h.roll(int(order[0]), 0).flip(0) if order[0] else h,
    "index_copy": lambda h, order: torch.zeros_like(h).index_copy(0, order.argsort(), h),
    "index_copy_": lambda h, order: torch.zeros_like(h).index_copy_(0, order.argsort(), h),
    "index_add": lambda h, order: torch.zeros_like(h).index_add(dim=0, index=order.argsort(), source=h),
    "index_put": lambda h, order: torch.zeros_like(h).index_put((order.argsort(),), h),
    "scatter": lambda h, order: torch.zeros_like(h).scatter(0, order.argsort()[:, None, None].expand_as(h), h),
    "one-hot": lambda h, order: torch.einsum("ij,jtd->itd", onehot(h, order), h),
    "one-hot product": lambda h, order: (onehot(h, order) @ h.flatten(1)).view_as(h),
    "one-hot by name": lambda h, order: torch.mm(onehot(h, order), mat2=h.flatten(1)).view_as(h),
    "one-hot turned": lambda h, order: (h.flatten(1).T @ onehot(h, order).T).T.reshape(h.shape),
    "tensordot": lambda h, order: torch.tensordot(onehot(h, order), h, 1),
    "addmm": lambda h, order: torch.addmm(h.new_zeros(1), onehot(h, order), h.flatten(1), beta=0, alpha=1).view_as(h),
    "multi_dot": lambda h, order: torch.linalg.multi_dot([onehot(h, order), h.flatten(1)]).view_as(h),
    "three dimensions": lambda h, order: (onehot(h, order)[None] @ h.flatten(1)[None]).view_as(h),
    "linear": lambda h, order: F.linear(onehot(h, order), h.flatten(1).T).view_as(h),
    "embedding of columns": lambda h, order: F.embedding(order[:, None], h.flatten(1)).view_as(h),
    "masked sum": lambda h, order: (onehot(h, order)[:, :, None, None] * h[None]).sum(1),
    "far away": lambda h, order: h.transpose(0, 2)[..., order].transpose(0, 2),
    "layers first": lambda h, order: torch.stack([h, h])[:, order].mean(0),
    "array of columns": lambda h, order: h.unsqueeze(0)[:, np.asarray(order)].squeeze(0),
    "out": lambda h, order: torch.index_select(h.detach(), 0, order, out=torch.empty(0)) + 0 * h,
}


@pytest.mark.parametrize("users", [2, 20])
@pytest.mark.parametrize("reorder", REORDERS.values(), ids=REORDERS)
def test_users_in_order_by_chance(reorder, users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, in the order of their lengths: the first batches are in order, and say nothing about the next one."""
    model, clipping, x = two_layers(users, monkeypatch)

    def losses_of(order: Tensor) -> Tensor:
        hidden = torch.tanh(model[1](reorder(torch.tanh(model[0](x)), order)))
        return per_user(hidden[order.argsort()])

    for order in (torch.arange(users), torch.arange(users), torch.arange(users).flip(0)):
        right_or_refused(clipping, model, lambda order=order: losses_of(order))


@pytest.mark.parametrize("frozen", [False, True])
def test_flat_ids_that_are_divided_otherwise(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 ids of 20 users, two each at first; then one user has three of them, and another one."""
    model = nn.ModuleList([nn.Embedding(9, D), nn.Linear(D, D)])
    model[0].requires_grad_(not frozen)
    clipping, ids = dp.PhantomClipping(model), torch.randint(0, 9, (40,))
    monkeypatch.setattr(clipping, "_due", lambda: False)

    def losses_of(user: Tensor) -> Tensor:
        hidden = torch.tanh(model[1](torch.tanh(model[0](ids))))
        return torch.zeros(20).index_add(0, user, per_user(hidden))

    uneven = torch.arange(20).repeat_interleave(2)
    uneven[1] = 1
    for user in (torch.arange(20).repeat_interleave(2), uneven):
        right_or_refused(clipping, model, lambda user=user: losses_of(user))


class Attends(nn.Module):
    """What most models do to rows: nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.lstm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LSTM(D, D, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q2, k2, v2 = self.qkv(x).view(*x.shape[:2], 3, D).permute(2, 0, 1, 3).unbind(0)
        h = torch.softmax(q @ k.mT, -1) @ v + torch.einsum("bqk,bkd->bqd", torch.softmax(q2 @ k2.mT, -1), v2)
        h = torch.cat([h[:, :1], h[:, 1:].roll(1, 1).flip(-1), h.sort(-1).values[..., :1, :]], 1)
        _, (last, _) = self.lstm(h.transpose(0, 1))
        steps = torch.stack([torch.tanh(step) for step in h.transpose(0, 1)], 1)
        return per_user(self.out(last[-1])[:, None] + steps)


def proofs_of(clipping: dp.PhantomClipping, losses_of, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of three batches are proven."""
    proofs: list[int] = []
    monkeypatch.setattr(engine, "prove", lambda *args: proofs.append(1) or proof.prove(*args))
    monkeypatch.setattr(clipping, "_due", lambda: False)
    for _ in range(3):
        step(clipping, losses_of)
    return len(proofs)


def test_models_that_leave_rows_where_they_are_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends()
    assert proofs_of(dp.PhantomClipping(model), lambda: model(torch.randn(16, 3, D)), monkeypatch) == 1


def test_rows_that_go_back_to_their_place_or_their_user_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts do, and losses of picked or packed rows."""
    model, x = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]), torch.randn(16, 3, D)
    chosen = (torch.arange(48) % 5 > 1).nonzero()[:, 0]

    def experts() -> Tensor:
        hidden = torch.tanh(model[0](x)).flatten(0, 1)
        picked = torch.tanh(model[1](hidden[chosen]))
        back = torch.zeros_like(hidden).index_add_(0, chosen, picked)
        return per_user(back.view_as(x)) + torch.zeros(16).index_add(0, chosen // 3, per_user(picked))

    assert proofs_of(dp.PhantomClipping(model), experts, monkeypatch) == 1
    clipping, user = dp.PhantomClipping(model), torch.tensor([*range(16), *range(8), *range(24)]) % 16

    def packed() -> Tensor:
        with clipping.packed(user):
            hidden = torch.tanh(model[1](torch.tanh(model[0](x.flatten(0, 1)))))
            return torch.zeros(16).index_add(0, user, per_user(hidden))

    assert proofs_of(clipping, packed, monkeypatch) == 1


TURNED = {
    "key": lambda h, order: h[:, order],
    "index_select": lambda h, order: h.index_select(1, order),
    "by name": lambda h, order: torch.index_select(h, index=order, dim=1),
    "dots": lambda h, order: h[..., order, :],
    "gather": lambda h, order: h.gather(1, order[None, :, None].expand_as(h)),
    "take_along_dim": lambda h, order: h.take_along_dim(order[None, :, None], 1),
    "product": lambda h, order: onehot(h, order) @ h,
    "index_copy": lambda h, order: torch.zeros(3, 20, D).index_copy(1, order.argsort(), h),
}


@pytest.mark.parametrize("reorder", TURNED.values(), ids=TURNED)
def test_users_reordered_time_first(reorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order in the first batch of many users; where they change places, every batch is proven."""
    model, clipping, x = two_layers(20, monkeypatch)

    def losses_of(order: Tensor) -> Tensor:
        hidden = reorder(torch.tanh(model[0](x)).transpose(0, 1), order)
        return per_user(torch.tanh(model[1](hidden)).transpose(0, 1)[order.argsort()])

    for order in (torch.arange(20), torch.arange(20).flip(0)):
        right_or_refused(clipping, model, lambda order=order: losses_of(order))


# Rows that were picked, and then pass something that could lose sight of it.


def sorted_by(layer: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[nn.Module, Callable]:
    """A layer before, and this one on users in an order; the losses are taken back."""
    model, x = nn.ModuleList([nn.Linear(D, D), layer]), torch.randn(20, 3, D)
    return model, lambda order: per_user(run(layer, torch.tanh(model[0](x))[order])[order.argsort()])


def time_first(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.transpose(0, 1)).transpose(0, 1)


def padded(write: Callable[[Tensor, Tensor], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(layer: nn.Module, h: Tensor) -> Tensor:
        buffer = torch.zeros(len(h), h.shape[1] + 1, D)
        write(buffer, h)
        return layer(buffer)

    return run


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(D, D))


PASSES = {
    "LSTM": (nn.LSTM(D, D, batch_first=True), lambda layer, h: layer(h)[0]),
    "LSTM time first": (nn.LSTM(D, D), lambda layer, h: layer(h.transpose(0, 1))[0].transpose(0, 1)),
    "GRU": (nn.GRU(D, D, batch_first=True), lambda layer, h: layer(h)[1][-1]),
    "GRUCell": (nn.GRUCell(D, D), lambda layer, h: layer(h[:, 0], h[:, 1])),
    "attention": (nn.MultiheadAttention(D, 2, batch_first=True), lambda layer, h: layer(h, h, h)[0]),
    "attention time first": (nn.MultiheadAttention(D, 2), lambda layer, h: time_first(lambda t: layer(t, t, t)[0], h)),
    "encoder": (nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True), lambda layer, h: layer(h)),
    "linear time first": (nn.Linear(D, D), time_first),
    "norm time first": (nn.LayerNorm(D), time_first),
    "moved": (nn.Linear(D, D), lambda layer, h: layer(h.movedim(0, 1)).movedim(1, 0)),
    "written": (nn.Linear(D, D), padded(lambda b, h: b.__setitem__((slice(None), slice(0, 3)), h))),
    "copied": (nn.Linear(D, D), padded(lambda b, h: b[:, 1:].copy_(h))),
    "added": (nn.Linear(D, D), padded(lambda b, h: b[:, 1:].add_(h))),
    "copied along time": (nn.Linear(D, D), padded(lambda b, h: b.index_copy_(1, torch.arange(3), h))),
    "scattered": (nn.Linear(D, D), lambda layer, h: layer(torch.zeros_like(h).index_copy(1, torch.arange(3), h))),
    "table": (Table(), lambda layer, h: h * 0.1 + layer.rows[h.argmax(-1)] * h.detach()),
    "vmap": (nn.Linear(D, D), lambda layer, h: layer(torch.vmap(torch.sin)(h))),
    "another order": (nn.Linear(D, D), lambda layer, h: layer(h + 0 * h.detach()[: len(h)])),
}


@pytest.mark.parametrize("name", PASSES)
def test_sorted_users_keep_their_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, losses_of = sorted_by(*PASSES[name])
    clipping = dp.PhantomClipping(model)
    monkeypatch.setattr(clipping, "_due", lambda: False)
    for order in (torch.arange(20), torch.arange(20).flip(0)):
        right_or_refused(clipping, model, lambda order=order: losses_of(order))


def test_sorted_users_of_a_recurrent_net_are_exact() -> None:
    torch.manual_seed(0)
    model, losses_of = sorted_by(*PASSES["LSTM"])
    step(dp.PhantomClipping(model), losses_of, torch.arange(20).flip(0))


VIEWS = {
    "copy": lambda b, h: b[:, 1:].copy_(h[:, :-1]),
    "key": lambda b, h: b[:, 1:][:, 0].__setitem__(slice(None), h[:, 0]),
    "detached": lambda b, h: b.detach()[:, 1:].copy_(h[:, :-1]),
}


@pytest.mark.parametrize("write", VIEWS.values(), ids=VIEWS)
def test_a_view_of_zeros_that_is_written_to(write) -> None:
    """What was zeros holds users' data then, and its gradient goes on; the proof could not see that it was cut off."""
    model, x = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]), torch.randn(4, 3, D)

    def losses_of() -> Tensor:
        hidden, buffer = torch.tanh(model[0](x)), torch.zeros(4, 3, D)
        write(buffer, hidden)
        return per_user(torch.tanh(model[1](hidden + buffer)))

    right_or_refused(dp.PhantomClipping(model), model, losses_of)


def test_two_contexts_are_proven_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clipping, x = two_layers(20, monkeypatch)
    stack = REORDERS["stack"]

    def losses_of(order: Tensor) -> Tensor:
        return per_user(torch.tanh(model[1](stack(torch.tanh(model[0](x)), order))))[order.argsort()]

    step(clipping, losses_of, torch.arange(20))
    with clipping:
        first = losses_of(torch.arange(20))
    with clipping:
        second = losses_of(torch.arange(20).flip(0))
    clipping.backward(first, dp.clip(0.5))
    with pytest.raises(dp.UnsupportedUse):
        clipping.backward(second, dp.clip(0.5))


def test_one_user_cannot_switch_the_proof_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite leaves nothing to compare with; rows that may have moved are then not released."""
    model, clipping, x = two_layers(20, monkeypatch)
    x[3, 0, 0] = float("nan")
    with pytest.raises(dp.UnsupportedUse, match="is not finite in a batch whose rows may have changed places"):
        step(clipping, lambda: per_user(model[1](torch.stack(list(torch.tanh(model[0](x)))))))


def test_losses_in_another_order_than_the_batch() -> None:
    model, x = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]), torch.randn(4, 3, D)
    order, clipping = torch.tensor([2, 0, 1, 3]), dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match="not in the order of the batch"):
        step(clipping, lambda: per_user(model[1](torch.tanh(model[0](x))[order])))
    with pytest.raises(dp.UnsupportedUse, match="not in the order of the batch"):  # raw samples are the batch
        step(clipping, lambda: per_user(model[1](torch.tanh(model[0](x[order]))))[order.argsort()])
    step(clipping, lambda: per_user(model[1](torch.tanh(model[0](x)).flatten(0, 1)[[2, 5, 6, 9]])))  # one of each user


def test_positions_time_first() -> None:
    model, x = nn.Linear(D, D), torch.randn(4, 3, D)
    model.positions = nn.Parameter(torch.randn(3, 1, D))
    clipping = dp.PhantomClipping(model)
    right_or_refused(
        clipping, model, lambda: per_user(model(x.tanh().transpose(0, 1) + model.positions).transpose(0, 1))
    )
    step(clipping, lambda: per_user(model(x.tanh().transpose(0, 1) + model.positions).transpose(0, 1)))


def test_steps_of_a_cell_stacked_time_first() -> None:
    """The usual loop: one state a step, stacked, turned back."""
    model, x = nn.ModuleList([nn.GRUCell(D, D), nn.Linear(D, D)]), torch.randn(4, 3, D)

    def losses_of() -> Tensor:
        state, states = torch.zeros(4, D), []
        for t in range(3):
            state = model[0](x[:, t], state)
            states.append(state)
        whole = torch.stack(states)
        return per_user(torch.tanh(model[1](whole)).transpose(0, 1)) + per_user(model[1](whole.transpose(0, 1) * 2))

    clipping = dp.PhantomClipping(model)
    step(clipping, losses_of)
    right_or_refused(clipping, model, losses_of)


def test_a_mask_that_writes_a_parameter() -> None:
    """As masked language models do it: some positions of some users become the mask token."""
    model, x = nn.Linear(D, D), torch.randn(4, 3, D)
    model.token = nn.Parameter(torch.randn(D))
    mask = torch.tensor([True, False, True, False])

    def losses_of() -> Tensor:
        hidden = torch.tanh(model(x)).clone()
        hidden[mask] = 0.5 * hidden[mask]
        hidden[~mask] = 0.0
        return per_user(hidden + model.token)

    right_or_refused(dp.PhantomClipping(model), model, losses_of)
    step(dp.PhantomClipping(model), losses_of)


WRITTEN = {
    "added": lambda y, e: y.add_(e),
    "relu": lambda y, e: F.relu(y, inplace=True),
    "masked": lambda y, e: y.masked_fill_(e > 0.5, 0.0),
    "key": lambda y, e: y.__setitem__((slice(None), 0), 0.0),
    "divided": lambda y, e: y.div_(2.0),
    "through a view": lambda y, e: y.view(len(y), -1).mul_(3.0),
}
LAYERS = {
    "linear": lambda: nn.Linear(D, D),
    "no bias": lambda: nn.Linear(D, D, bias=False),
    "attention": lambda: nn.MultiheadAttention(D, 2, batch_first=True),
    "norm": lambda: nn.LayerNorm(D),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True),
    "convolution": lambda: nn.Conv1d(3, 3, 1),
}


@pytest.mark.parametrize("first", [False, True], ids=["inner", "first"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_a_result_that_the_model_writes_into(write, layer, first: bool) -> None:
    """F.linear of three dimensions gives a view: what was written there took the gradient past the engine, unseen."""
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(D, D), layer()]), torch.randn(4, 3, D)

    def losses_of() -> Tensor:
        e = x if first else torch.tanh(model[0](x))
        y = model[1](e, e, e)[0] if isinstance(model[1], nn.MultiheadAttention) else model[1](e)
        if isinstance(model[1], nn.MultiheadAttention) and "view" in write.__code__.co_names:
            y = y.contiguous()  # batch first it is a view that torch itself cannot view
        write(y, e)
        return per_user(torch.sin(y)) + (0 * per_user(model[0](x)) if first else 0)

    right_or_refused(dp.PhantomClipping(model), model, losses_of)
    step(dp.PhantomClipping(model), losses_of)


STRAIGHT = {
    "linear": (nn.Linear(D, D), torch.randn(20, 3, D)),
    "embedding": (nn.Embedding(9, D), torch.randint(0, 9, (20, 3))),
    "norm": (nn.LayerNorm(D), torch.randn(20, 3, D)),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_rows_moved_straight_after_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back by hand: nothing but the proof of that batch sees it."""
    layer, x = STRAIGHT[name]
    model = nn.ModuleList([layer, nn.Linear(D, D)])
    clipping = dp.PhantomClipping(model)
    monkeypatch.setattr(clipping, "_due", lambda: False)

    def losses_of(order: Tensor) -> Tensor:
        h = model[0](x)
        y = model[1](torch.stack([h[i] for i in order.tolist()]))
        return per_user(torch.sin(torch.stack([y[i] for i in order.argsort().tolist()])))

    for order in (torch.arange(20), torch.arange(20).flip(0)):
        right_or_refused(clipping, model, lambda order=order: losses_of(order))


def test_rows_moved_between_two_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clipping, x = two_layers(20, monkeypatch)
    for order in (torch.arange(20), torch.arange(20).flip(0)):

        def run(order: Tensor = order) -> Tensor:
            with clipping:
                hidden = torch.tanh(model[0](x))
            hidden = hidden[order]
            with clipping:
                losses = per_user(torch.tanh(model[1](hidden)))
            return clipping.backward(losses[order.argsort()], dp.clip(0.5))

        if order[0] == 0:
            run()
        else:
            with pytest.raises(dp.UnsupportedUse):
                run()


def test_losses_of_another_engine() -> None:
    model, x = nn.Linear(D, D), torch.randn(4, 3, D)
    one, other = dp.PhantomClipping(model), dp.PhantomClipping(model)
    with one:
        losses = per_user(model(x))
    with pytest.raises(dp.UnsupportedUse, match="anything that this engine has recorded"):
        other.backward(losses, dp.clip(0.5))


def test_raw_data_time_first() -> None:
    """It is refused in a sentence, not by an error of torch."""
    model, x = nn.ModuleList([nn.Linear(D, D), nn.Linear(3, D)]), torch.randn(3, 20, D)
    with pytest.raises(dp.UnsupportedUse):
        step(
            dp.PhantomClipping(model),
            lambda: per_user(model[1](torch.tanh(model[0](x.transpose(0, 1))).transpose(0, 1).sum(-1).t())),
        )


SPELLED = {
    "dots": lambda h: h.sum()[...] * 0 + h,
    "no key": lambda h: h.sum()[()] * 0 + h,
    "reshape by name": lambda h: torch.reshape(input=h, shape=(4, 3, D)),
    "shape by name": lambda h: h.reshape(shape=(4, 3, D)),
    "another dtype": lambda h: h + 0 * h.detach().view(torch.int32).view(torch.float32),
    "dot by name": lambda h: torch.dot(input=h.flatten(), tensor=torch.zeros(h.numel())) * 0 + h,
    "matmul by name": lambda h: torch.matmul(other=torch.eye(D), input=h),
    "cat by name": lambda h: torch.cat(tensors=[h[:, :1], h[:, 1:]], dim=1),
    "repeats by name": lambda h: h + 0 * torch.repeat_interleave(repeats=torch.ones(3, dtype=torch.long))[:, None],
    "written": lambda h: torch.zeros(()).__setitem__(Ellipsis, h.detach().sum()) or h,
}


@pytest.mark.parametrize("spell", SPELLED.values(), ids=SPELLED)
def test_ways_to_write_what_moves_nothing(spell) -> None:
    model, x = nn.Linear(D, D), torch.randn(4, 3, D)
    clipping = dp.PhantomClipping(model)
    step(clipping, lambda: per_user(model(spell(torch.tanh(model(x))))))


def test_rows_put_back_among_others_are_not_taken_for_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target was picked itself, or packed rows were: the place that is named is not where they belong."""
    model, clipping, x = two_layers(20, monkeypatch)
    keep, user = torch.arange(10), torch.arange(20)

    def among(order: Tensor) -> Tensor:
        h = torch.tanh(model[0](x))
        mixed = h[order].index_add(0, keep, torch.tanh(model[1](h[keep])))
        return per_user(torch.tanh(model[1](mixed))[order.argsort()])

    def packed(order: Tensor) -> Tensor:
        with clipping.packed(user):
            h = torch.tanh(model[1](torch.tanh(model[0](x[:, 0]))))
            return torch.zeros(20).index_add(0, user, per_user(torch.tanh(model[1](h[order]))))

    for losses_of in (among, packed):
        for order in (torch.arange(20), torch.arange(20).flip(0)):
            right_or_refused(clipping, model, lambda order=order, losses_of=losses_of: losses_of(order))


@pytest.mark.parametrize("factor", [10.0, -1.0])
def test_a_hook_of_the_users_own_on_a_result(factor: float) -> None:
    """It changes this layer's gradients, and what flows further down, as in plain torch; and the bound holds."""
    model, x = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)]), torch.randn(4, 3, D)

    def losses_of(x: Tensor) -> Tensor:
        hidden = model[1](torch.tanh(model[0](x)))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: factor * g)
        return 100 * per_user(model[2](torch.tanh(hidden)))

    def added(x: Tensor) -> Tensor:
        model.zero_grad()
        step(dp.PhantomClipping(model), losses_of, x)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def plain(x: Tensor) -> Tensor:
        model.zero_grad()
        losses_of(x).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        return gradient * min(1.0, 0.5 / float(gradient.norm()))

    alone = torch.stack([added(one[None]) for one in x])
    assert alone.norm(dim=1).max() <= 0.5 * (1 + 1e-5)
    torch.testing.assert_close(alone, torch.stack([plain(one[None]) for one in x]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(added(x), alone.sum(0), rtol=1e-4, atol=1e-5)
