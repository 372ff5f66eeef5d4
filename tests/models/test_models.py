"""Promises of every model: one loss per user, users do not mix, padding has no effect, bad input is named."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dpformer.models import GRU, LSTM, Batch, SequenceModel, Transformer

ITEMS, LENGTH = 23, 12
HISTORIES = [[1, 2, 3, 2, 2, 5, 7, 1, 22], [4, 0], [6, 6, 6, 6], [9], [], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]]
FREQUENCIES = torch.linspace(0, 0.9, ITEMS, dtype=torch.float64)

MODELS: dict[str, Callable[[], SequenceModel]] = {
    "transformer": lambda: Transformer(ITEMS, LENGTH, dim=8),
    "not shared": lambda: Transformer(ITEMS, LENGTH, dim=8, shared=False),
    "pre-norm, heads, gelu": lambda: Transformer(
        ITEMS, LENGTH, dim=8, heads=2, norm="pre", activation="gelu", blocks=3
    ),
    "re-attention": lambda: _noisy(Transformer(ITEMS, LENGTH, dim=8, reattention=True)),
    "re-attention, literal": lambda: _noisy(Transformer(ITEMS, LENGTH, dim=8, heads=4, reattention="literal")),
    "re-attention, pre-norm, gelu": lambda: _noisy(
        Transformer(ITEMS, LENGTH, dim=8, heads=2, blocks=3, reattention=True, norm="pre", activation="gelu")
    ),
    "gru": lambda: GRU(ITEMS, LENGTH, dim=8),
    "lstm, not shared": lambda: LSTM(ITEMS, LENGTH, dim=8, shared=False),
}


def _noisy(model: Transformer) -> Transformer:
    model.set_privacy(2.0, 10, FREQUENCIES)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    torch.manual_seed(0)
    made = MODELS[request.param]().double().eval()
    with torch.no_grad():  # larger numbers than at the start, so that every path counts
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def test_losses_are_the_mean_over_the_users_own_positions(model: SequenceModel) -> None:
    model.set_frequencies(FREQUENCIES)
    batch = Batch.from_histories(HISTORIES, LENGTH)
    logits = F.linear(model.hidden(batch), model.output_weight(), model.bias)
    losses = model(batch)
    assert losses.shape == (len(HISTORIES),)
    for row, n in enumerate(batch.lengths.tolist()):
        want = F.cross_entropy(logits[row, :n], batch.targets[row, :n]) if n else torch.tensor(0.0).double()
        torch.testing.assert_close(losses[row], want)


def test_no_user_depends_on_another_and_none_on_padding(model: SequenceModel) -> None:
    losses = model(Batch.from_histories(HISTORIES, LENGTH))
    scores = model.scores(HISTORIES)
    for row, history in enumerate(HISTORIES):
        torch.testing.assert_close(losses[row], model(Batch.from_histories([history], LENGTH))[0])
        torch.testing.assert_close(scores[row], model.scores([history])[0])


def test_the_future_is_not_seen(model: SequenceModel) -> None:
    batch = Batch.from_histories([HISTORIES[0]], LENGTH)
    items = batch.items.clone()
    items[0, 5:] = 17
    changed = model.hidden(Batch(items, batch.targets, batch.lengths))
    torch.testing.assert_close(changed[0, :5], model.hidden(batch)[0, :5])
    assert not torch.allclose(changed[0, 5:], model.hidden(batch)[0, 5:])


def test_scores_are_the_logits_after_the_last_item(model: SequenceModel) -> None:
    model.set_frequencies(FREQUENCIES)
    history = HISTORIES[0]
    batch = Batch.from_histories([[*history, 3]], LENGTH)
    want = F.linear(model.hidden(batch)[0, len(history) - 1], model.output_weight(), model.bias)
    torch.testing.assert_close(model.scores([history])[0], want)
    torch.testing.assert_close(model.scores([[]])[0], model.bias)
    torch.testing.assert_close(model.scores([HISTORIES[-1]]), model.scores([HISTORIES[-1][-LENGTH:]]))


def test_pads_get_no_gradient(model: SequenceModel) -> None:
    """Item 0 pads the short row; its gradient must be that of the row alone."""
    together = model(Batch.from_histories([[4, 3], list(range(10))], LENGTH))
    (got,) = torch.autograd.grad(together[0], model.items.weight)
    (want,) = torch.autograd.grad(model(Batch.from_histories([[4, 3]], LENGTH))[0], model.items.weight)
    torch.testing.assert_close(got, want)


def test_an_empty_batch_has_no_losses(model: SequenceModel) -> None:
    losses = model(Batch.from_histories([], LENGTH))
    assert losses.shape == (0,)
    losses.sum().backward()


def test_bad_input_is_named(model: SequenceModel) -> None:
    with pytest.raises(ValueError, match="item 23 is outside the vocabulary 0 … 22"):
        model.scores([[23]])
    with pytest.raises(ValueError, match="item -1 is outside"):
        model(Batch.from_histories([[-1, 2]], LENGTH))
    with pytest.raises(ValueError, match="a history has 13 items, but the model takes 12"):
        model(Batch.from_histories([list(range(14))], LENGTH + 1))
    with pytest.raises(ValueError, match=r"frequencies have shape \(3,\)"):
        model.set_frequencies(torch.ones(3))
    with pytest.raises(ValueError, match="negative or not finite"):
        model.set_frequencies(torch.full((ITEMS,), math.nan))
    with pytest.raises(ValueError, match="all frequencies are 0"):
        model.set_frequencies(torch.zeros(ITEMS))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_about_the_noise_travels_with_the_weights(name: str) -> None:
    model, fresh = MODELS[name]().eval(), MODELS[name]().eval()
    model.set_frequencies(FREQUENCIES)
    if isinstance(model, Transformer):
        model.set_privacy(3.0, 10, FREQUENCIES)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.scores(HISTORIES), model.scores(HISTORIES))


def test_training_starts_at_popularity() -> None:
    torch.manual_seed(0)
    for make in MODELS.values():
        made = make().eval()
        made.set_frequencies(FREQUENCIES)
        logits = made.scores(HISTORIES)
        assert (logits - made.bias).abs().max() < 1.0
        torch.testing.assert_close(made.bias.exp().sum(), torch.tensor(1.0))
        torch.testing.assert_close(made.bias[0].exp() * 2, made.bias[1].exp())  # p = 0: half of the rarest
