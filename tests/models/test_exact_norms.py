"""Phantom Clipping's norms on every model are those of one user at a time under plain autograd, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer import PhantomClipping, clip, normalize
from dpformer.models import Batch, SequenceModel

from .test_models import HISTORIES, ITEMS, LENGTH, MODELS


def made(name: str) -> SequenceModel:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    model.set_frequencies(torch.linspace(0.01, 0.9, ITEMS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def one_at_a_time(model: SequenceModel, histories: list[list[int]]) -> list[list[torch.Tensor]]:
    gradients = []
    for history in histories:
        loss = model(Batch.from_histories([history], LENGTH))[0]
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
        gradients.append(list(found))
    return gradients


def assert_exact(model: SequenceModel, histories: list[list[int]]) -> None:
    gradients = one_at_a_time(model, histories)
    want = torch.tensor([sum(g.square().sum() for g in user) ** 0.5 for user in gradients], dtype=torch.float64)
    for rule in (clip(0.5), normalize(1.0)):
        model.zero_grad()
        clipping = PhantomClipping(model, self_check=False)
        with clipping.users(Batch.from_histories(histories, LENGTH)) as user:
            loss = model(user)
        norms = clipping.backward(loss, rule)
        torch.testing.assert_close(norms, want, rtol=1e-9, atol=1e-12)
        factors = rule(want)
        for i, parameter in enumerate(model.parameters()):
            total = sum(f * user[i] for f, user in zip(factors, gradients, strict=True))
            torch.testing.assert_close(parameter.grad, total, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_sums(name: str) -> None:
    assert_exact(made(name), HISTORIES)


@pytest.mark.parametrize("name", MODELS)
@given(st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=LENGTH + 2), min_size=1, max_size=4))
@settings(max_examples=6)
def test_any_histories(name: str, histories: list[list[int]]) -> None:
    assert_exact(made(name), histories)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_proves_itself_in_training_with_dropout(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    clipping = PhantomClipping(model)
    with clipping.users(Batch.from_histories(HISTORIES, LENGTH)) as user:
        loss = model(user)
    norms = clipping.backward(loss, normalize(1.0))
    assert norms.isfinite().all() and (norms[:3] > 0).all()
    assert norms[3] == norms[4] == 0  # nothing to predict, nothing to learn
