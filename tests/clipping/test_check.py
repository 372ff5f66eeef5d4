"""Users mixed through values: gradients cannot show it, a user computed alone does.

Every model of the first list was once trained without a word; a user's contribution then depends on others, by many
times C. Those of the second list are right, however random they are.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import isolation

D = 6


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))


def users(count: int = 8) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1))


def each(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def refused(losses_of: Callable[..., Tensor], samples: object, words: str = "depend on that user alone") -> None:
    with pytest.raises(dp.UnsupportedUse, match=words):
        dp.check(losses_of, samples)


# What mixes users. The engine alone sees nothing of it, which each test shows first where it can be shown.


def engine_sees_nothing(model: nn.Module, losses_of: Callable[[Tensor], Tensor], x: Tensor) -> None:
    clipping = dp.PhantomClipping(model)
    with clipping.users(x) as user:
        losses = losses_of(user)
    clipping.backward(losses, dp.clip(1.0))


def test_detached_negatives_of_the_batch() -> None:
    model = body()

    def losses_of(x: Tensor) -> Tensor:
        y = model(x)
        return F.cross_entropy(y @ y.detach().T, torch.arange(len(x)), reduction="none")

    engine_sees_nothing(model, losses_of, users())
    refused(losses_of, users())


def test_detached_centring() -> None:
    model = body()

    def losses_of(x: Tensor) -> Tensor:
        y = model(x)
        return each(y - y.mean(0).detach())

    engine_sees_nothing(model, losses_of, users())
    refused(losses_of, users())


def test_weights_by_the_median_of_the_batch() -> None:
    model = body()

    def losses_of(x: Tensor) -> Tensor:
        losses = each(model(x))
        return losses * (losses.detach() > losses.detach().median()).float()

    engine_sees_nothing(model, losses_of, users())
    refused(losses_of, users())


def test_inputs_standardised_over_the_batch() -> None:
    model = body()
    refused(lambda x: each(model((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3))), users())


def test_names_padded_over_the_batch() -> None:
    """Opacus' char-LSTM: the last state of a short name is taken after the padding of the longest one."""
    torch.manual_seed(0)
    embedding, lstm, head = nn.Embedding(30, 5), nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 2)
    names = [torch.randint(1, 30, (n,)) for n in (3, 4, 5, 3, 30)]

    def collate(samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def losses_of(samples: list[Tensor]) -> Tensor:
        hidden, _ = lstm(embedding(collate(samples)))
        return F.cross_entropy(head(hidden[:, -1]), torch.ones(len(samples)).long(), reduction="none")

    refused(losses_of, names)

    def right(samples: list[Tensor]) -> Tensor:
        hidden, _ = lstm(embedding(collate(samples)))
        last = hidden[torch.arange(len(samples)), torch.tensor([len(s) - 1 for s in samples])]
        return F.cross_entropy(head(last), torch.ones(len(samples)).long(), reduction="none")

    dp.check(right, names)


def test_the_hardest_half() -> None:
    model = body()

    def losses_of(x: Tensor) -> Tensor:
        losses = each(model(x))
        kept = torch.zeros(len(x)).scatter(0, losses.topk(max(1, len(x) // 2)).indices, 1.0)
        return losses * kept

    refused(losses_of, users(16))


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_mixup(source: str) -> None:
    model = body()

    def losses_of(x: Tensor) -> Tensor:
        if source == "torch":
            order, share = torch.randperm(len(x)), float(torch.rand(()))
        elif source == "numpy":
            order, share = torch.from_numpy(np.random.permutation(len(x))), np.random.beta(1.0, 1.0)
        else:
            order, share = torch.tensor(random.sample(range(len(x)), len(x))), random.random()
        return each(model(share * x + (1 - share) * x[order]))

    refused(losses_of, users(16))


def test_capacity_of_experts() -> None:
    """Who comes too late finds the expert full."""
    torch.manual_seed(0)
    gate, experts = nn.Linear(D, 2), nn.ModuleList([nn.Linear(D, 3), nn.Linear(D, 3)])

    def losses_of(x: Tensor) -> Tensor:
        choice, out = gate(x).argmax(1), torch.zeros(len(x), 3)
        for i, expert in enumerate(experts):
            taken = (choice == i).nonzero()[:, 0][: 1 + len(x) // 4]
            out = out.index_add(0, taken, expert(x[taken]))
        return each(out - 1)

    refused(losses_of, users(16))


class Remembers(nn.Module):
    def __init__(self, remember: Callable) -> None:
        super().__init__()
        self.body, self.remember, self.mean, self.queue = body(), remember, 0.0, []
        self.register_buffer("average", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return each(self.body(self.remember(self, x)))


def running_mean(m: Remembers, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * float(x.mean())
    return x - m.mean


def buffer(m: Remembers, x: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * x.mean(0)
    return x - m.average


def queue(m: Remembers, x: Tensor) -> Tensor:
    shift = torch.stack(m.queue[-4:]).mean(0) if m.queue else torch.zeros(D)
    m.queue += list(x.detach())
    return x - shift


def unread_buffer(m: Remembers, x: Tensor) -> Tensor:
    m.average = x.mean(0)  # for later: it is in the released model
    return x


@pytest.mark.parametrize("remember", [running_mean, buffer, queue, unread_buffer])
def test_what_is_remembered_of_past_users(remember: Callable) -> None:
    model = Remembers(remember)
    refused(model, users(), "depend on that user alone|'average' was replaced")
    model = Remembers(remember)
    refused(lambda x: model(x), users(), "depend on that user alone|'average' was replaced")


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * len(grad)


def test_a_backward_pass_that_looks_at_the_batch() -> None:
    """The losses are right: only the gradient tells."""
    model = body()
    refused(lambda x: each(_Rescaled.apply(model(x))), users(), "the gradient of user")


def test_a_mean_over_the_batch() -> None:
    model = body()
    refused(lambda x: each(model(x)) / len(x), users())


# In a loop.


def test_mixing_that_begins_in_the_second_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, epoch = body(), [1]

    def losses_of(x: Tensor) -> Tensor:
        y = model(x)
        return each(y - y.mean(0).detach()) if epoch[0] > 1 else each(y)

    check = dp.check(losses_of, users())
    monkeypatch.setattr(isolation, "EVERY", 4)
    for _ in range(50):
        check(users())
    epoch[0] = 2
    with pytest.raises(dp.UnsupportedUse):
        for _ in range(200):
            check(users())


def test_checks_in_a_loop_are_rare_and_come() -> None:
    calls = [0]

    def losses_of(x: Tensor) -> Tensor:
        calls[0] += 1
        return each(x)

    check = dp.clipping.Check(losses_of)
    for _ in range(20 * isolation.EVERY):
        check(torch.ones(2, 1))
    assert isolation.EVERY >= 100 and 0 < calls[0] < 60 * 10
    for small in (torch.ones(0, 1), torch.ones(1, 1)):
        for _ in range(5 * isolation.EVERY):
            check(small)  # an empty part is no reason to stop


# What is right is left alone, and leaves no trace.


class Encoder(nn.Module):
    """A Transformer with every dropout there is, padded on either side."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.left, self.table = left, nn.Embedding(20, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, samples: list[Tensor]) -> Tensor:
        side = "left" if self.left else "right"
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_side=side)
        hidden = self.layer(F.dropout(self.table(x), 0.2), src_key_padding_mask=x == 0)
        losses = F.cross_entropy(self.head(hidden).mT, x, reduction="none")
        return (losses * (x > 0)).sum(1) / (x > 0).sum(1)


@pytest.mark.parametrize("left", [False, True])
def test_a_transformer_with_dropout_and_padding(left: bool) -> None:
    torch.manual_seed(0)
    dp.check(Encoder(left), [torch.randint(1, 20, (n,)) for n in (2, 7, 3, 5)])


def sampled_negatives(x: Tensor) -> Tensor:
    return each(x - torch.randint(0, 9, (len(x), 4, 1)).float().mean(1))


def masked_tokens(x: Tensor) -> Tensor:
    return each(torch.where(torch.rand(x.shape) < 0.15, 0.0, x) + 0.1 * torch.randn_like(x))


def gumbel(x: Tensor) -> Tensor:
    return each(F.gumbel_softmax(x) + F.one_hot(torch.multinomial(x.softmax(1), 1)[:, 0], D))


def stochastic_depth(x: Tensor) -> Tensor:
    return each(x + torch.bernoulli(torch.full((len(x), 1), 0.5)) * x.tanh())


def for_all_alike(x: Tensor) -> Tensor:
    return each(x * 2 if torch.rand(()) < 0.5 else x)


RANDOM = [sampled_negatives, masked_tokens, gumbel, stochastic_depth, for_all_alike]


@pytest.mark.parametrize("losses_of", RANDOM, ids=lambda f: f.__name__)
def test_random_models_that_are_right(losses_of: Callable[[Tensor], Tensor]) -> None:
    for _ in range(5):
        dp.check(losses_of, users())


def test_recurrent_networks_with_dropout() -> None:
    lstm = nn.LSTM(D, 8, num_layers=2, dropout=0.5, batch_first=True)
    dp.check(lambda x: each(lstm(x[:, None].expand(-1, 4, -1))[0]), users())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = body().to(dtype)
    dp.check(lambda x: each(model(x)), users().to(dtype))
    refused(lambda x: each(model(x) - model(x).mean(0)), users().to(dtype))


def test_autocast() -> None:
    """Losses are in float32, and their digits are those of bfloat16."""
    model = nn.Sequential(nn.Linear(D, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))

    def losses_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return each(y.float())

    dp.check(losses_of, users(16))


def test_the_forms_of_users() -> None:
    model, data = body(), users()
    dp.check(lambda some: each(model(data[some])), torch.arange(8))  # their indices
    dp.check(lambda some: each(model(data[some])), np.arange(8))
    dp.check(lambda some: each(model(torch.stack(some))), list(data))  # raw samples
    dp.check(lambda some: each(model(some[0]) - some[1]), (data, torch.ones(8, 3)))
    dp.check(lambda some: each(model(some["x"])), {"x": data})
    dp.check(lambda some: each(model(some)), data[:2])


def test_a_user_who_is_not_finite_is_left_out() -> None:
    model, x = body(), users()
    x[3] = float("nan")
    dp.check(lambda x: each(model(x)), x)
    refused(lambda x: each(model(x)), x * float("nan"), "nothing can be compared")


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    wanted = (torch.rand(3), np.random.rand(), random.random())
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    dp.check(lambda x: masked_tokens(x) + 0 * np.random.rand() + 0 * random.random(), users())
    got = (torch.rand(3), np.random.rand(), random.random())
    assert torch.equal(wanted[0], got[0]) and wanted[1:] == got[1:]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="two or more, not 1"):
        dp.check(each, users(1))
    with pytest.raises(ValueError, match=r"shape \(8,\), got shape \(\)"):
        dp.check(lambda x: each(x).mean(), users())


def test_inputs_that_are_marked_in_each_call_are_no_parameters() -> None:
    """As `enable_input_require_grads` of transformers does for LoRA: a new leaf in each call."""
    table, head = nn.Embedding(9, 4).requires_grad_(False), nn.Linear(4, 1)

    def losses_of(ids: Tensor) -> Tensor:
        return head(table(ids).requires_grad_()).square().sum((1, 2))

    dp.check(losses_of, torch.randint(0, 9, (5, 3)))
