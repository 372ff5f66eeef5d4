"""What has no exact rule is refused by name; what is only a surprise is said clearly. Nothing is silently wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from tests.clipping.naive import engine
from tests.clipping.problems import per_user

D = 6


class Holder(nn.Module):
    """A model with one of everything; the test gives its forward pass."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.run = forward
        self.linear, self.table, self.norm = nn.Linear(D, D), nn.Embedding(9, D), nn.BatchNorm1d(D)
        self.w, self.gru = nn.Parameter(torch.randn(D, D)), nn.GRU(D, D, batch_first=True)
        self.extra: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def refused(forward, x: Tensor, *words: str) -> None:
    torch.manual_seed(0)
    model = Holder(forward)
    with pytest.raises(dp.UnsupportedUse) as caught:
        engine(model, (x,), dp.normalize(1.0))
    for word in words:
        assert word in str(caught.value)
    assert all(p.grad is None for p in model.parameters()), "a refused pass must leave no gradient"


X2, X3 = torch.randn(4, D), torch.randn(4, 5, D)


def test_what_a_rule_read_is_changed_in_place() -> None:
    """Plain autograd would refuse this too: here only the recorded call keeps the input of the layer."""

    def forward(m: Holder, x: Tensor) -> Tensor:
        h = torch.sin(m.table(x))
        y = m.linear(h)
        h += 1
        return per_user(y)

    refused(forward, torch.randint(0, 9, (4, 5)), "'linear.weight'", "linear", "changed in place")


def test_batch_norm() -> None:
    refused(lambda m, x: per_user(m.norm(m.linear(x))), X2, "batch_norm", "LayerNorm")


def test_batch_norm_without_parameters() -> None:
    refused(
        lambda m, x: per_user(F.batch_norm(m.linear(x), None, None, training=True)), X2, "batch_norm", "mixes users"
    )


def test_running_statistics_of_users() -> None:
    def forward(m: Holder, x: Tensor) -> Tensor:
        m.norm.running_mean.mul_(0.9).add_(x.mean(0))
        return per_user(m.linear(x) - m.norm.running_mean)

    refused(forward, X2, "buffer")


def test_positions_made_outside_the_forward_pass_with_as_many_as_users() -> None:
    """A tensor that the engine cannot know to be a constant."""
    places = torch.arange(5)
    refused(
        lambda m, x: per_user(torch.tanh(m.table(x) + m.table(places))), torch.randint(0, 9, (5, 5)), "came in past"
    )


def test_no_grad() -> None:
    def forward(m: Holder, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = m.linear(x)
        return per_user(h * m.w[0])

    refused(forward, X2, "no_grad", "'linear.weight'")


def test_detach_is_allowed() -> None:
    model = Holder(lambda m, x: per_user(m.linear(x) * F.linear(x, m.w.detach())))
    engine(model, (X2,), dp.normalize(1.0))
    assert model.w.grad is None


def use_outside(model: Holder, clipping: dp.PhantomClipping) -> None:
    outside = F.linear(X2, model.w)
    with clipping.users(outside) as user:
        losses = model(user)
    with pytest.raises(dp.UnsupportedUse, match="outside"):
        clipping.backward(losses, dp.normalize(1.0))


def test_a_use_outside_the_context() -> None:
    model = Holder(lambda m, x: per_user(m.linear(x)))
    use_outside(model, dp.PhantomClipping(model))
    assert model.w.grad is None


def test_a_use_outside_the_context_leaves_the_sum_of_earlier_parts_alone() -> None:
    model = Holder(lambda m, x: per_user(F.linear(m.linear(x), m.w)))
    clipping = dp.PhantomClipping(model)
    with clipping.users(X2) as user:
        losses = model(user)
    clipping.backward(losses, dp.normalize(1.0))
    before, numbers = model.w.grad, model.w.grad.clone()
    use_outside(model, clipping)
    assert model.w.grad is before and torch.equal(before, numbers)


def test_a_use_outside_the_context_whose_gradient_a_hook_takes_away() -> None:
    """As an optimizer inside the backward pass does: it must never see the raw gradient."""
    model = Holder(lambda m, x: per_user(m.linear(x)))
    seen: list[Tensor] = []
    model.w.register_post_accumulate_grad_hook(lambda w: (seen.append(w.grad), setattr(w, "grad", None))[1])
    use_outside(model, dp.PhantomClipping(model))
    assert not seen


def test_a_parameter_frozen_after_the_forward_pass() -> None:
    model = Holder(lambda m, x: per_user(F.linear(m.linear(x), m.w)))
    clipping = dp.PhantomClipping(model)
    with clipping.users(X2) as user:
        losses = model(user)
    model.w.requires_grad_(False)
    with pytest.raises(dp.UnsupportedUse, match="'w' was frozen"):
        clipping.backward(losses, dp.normalize(1.0))
    model.w.requires_grad_(True)


def test_a_parameter_frozen_in_between_and_another_forward_pass() -> None:
    model = Holder(lambda m, x: per_user(F.linear(m.linear(x), m.w)))
    clipping = dp.PhantomClipping(model)
    with clipping.users(X2) as user:
        losses = model(user)
    model.w.requires_grad_(False)
    with clipping.users(X2) as user:
        model(user)
    model.w.requires_grad_(True)
    with pytest.raises(dp.UnsupportedUse, match="'w' was frozen"):
        clipping.backward(losses, dp.normalize(1.0))


def test_all_of_it_outside_the_context() -> None:
    model = Holder(lambda m, x: per_user(m.linear(x)))
    with pytest.raises(dp.UnsupportedUse, match="not computed inside"):
        dp.PhantomClipping(model).backward(model(X2), dp.normalize(1.0))
    assert model.linear.weight.grad is None


def test_a_parameter_of_another_model() -> None:
    other = nn.Linear(D, D)
    refused(lambda m, x: per_user(other(m.linear(x))), X2, "neither the model's nor the user's")


def test_hooks_on_saved_tensors() -> None:
    def forward(m: Holder, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return per_user(m.linear(torch.tanh(m.linear(x))))

    refused(forward, X2, "hooks on saved tensors", "micro-batches")


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_code() -> None:
    """Also what begins without gradients: the gate was compiled along with it, and the layer went unseen."""
    words = ("torch.compile", "the model itself")
    refused(lambda m, x: per_user(torch.compile(m.linear, backend="eager")(x)), X2, *words)
    later = lambda m, x: per_user(torch.compile(lambda x: m.linear(torch.relu(x) + 1), backend="eager")(x))  # noqa: E731
    refused(later, X2, *words)


def test_a_parameter_without_numbers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(3, 2), nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.some(x).square().mean(1) + F.linear(x, self.none).sum(1)

    clipping = dp.PhantomClipping(Model())
    with (
        pytest.raises(dp.UnsupportedUse, match=r"'none' is used by .* no numbers"),
        clipping.users(torch.randn(4, 3)) as user,
    ):
        clipping.model(user)


def test_embedding_options_that_look_at_other_users() -> None:
    refused(
        lambda m, x: per_user(F.embedding(x, m.table.weight, scale_grad_by_freq=True)),
        torch.randint(0, 9, (4, 5)),
        "scale_grad_by_freq",
    )


def test_losses_that_are_not_one_number_a_user() -> None:
    model = Holder(lambda m, x: m.linear(x).square())
    with pytest.raises(ValueError, match="one user's loss must be one number"):
        engine(model, (X2,), dp.normalize(1.0))


def test_a_clip_function_that_breaks_its_promise() -> None:
    class Broken(dp.normalize):
        def __call__(self, norms: Tensor) -> Tensor:
            return torch.full_like(norms, 100.0)

    with pytest.raises(ValueError, match="promises norms up to"):
        engine(Holder(lambda m, x: per_user(m.linear(x))), (X2,), Broken(1.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_clip_norms_must_be_positive(bad: float) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        dp.clip(bad)
    with pytest.raises(ValueError, match=str(bad)):
        dp.normalize(bad)


def test_after_a_refusal_the_engine_works_again() -> None:
    model = Holder(lambda m, x: per_user(F.batch_norm(x @ m.w, None, None, training=True)))
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse), clipping.users(X2) as user:
        model(user)
    model.run = lambda m, x: per_user(F.linear(x, m.w))
    with clipping.users(X2) as user:
        losses = model(user)
    assert clipping.backward(losses, dp.normalize(1.0)).shape == (4,)
