"""Ablations of Re-Attention: each changes what it says, nothing is left changed, and per-user gradients stay exact."""

import pytest
import torch
from torch import Tensor

from dpformer.models import Batch, Transformer
from dpformer.models.transformer import SelfAttention
from dpformer.reattention.attention import attention_weights
from experiments import ablation
from tests.models.test_exact_norms import assert_exact
from tests.models.test_models import HISTORIES, ITEMS, LENGTH


@pytest.fixture(autouse=True)
def means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "MEANS", (0.9, 0.5))


def built(reattention: bool | str = "literal") -> Transformer:
    """A network far from its start, in float64, whose attention is clearly corrected if it is."""
    torch.manual_seed(0)
    model = Transformer(ITEMS, LENGTH, dim=8, heads=2, reattention=reattention).double().eval()
    model.set_privacy(1.0, 20.0, torch.linspace(0.01, 0.9, ITEMS, dtype=torch.float64), 0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("gate"):
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def maps_of(model: Transformer) -> list[Tensor]:
    return model.attention_maps(Batch.from_histories(HISTORIES, LENGTH))


@pytest.mark.parametrize("name", ablation.ABLATIONS)
def test_gradients_of_users_stay_exact(name: str) -> None:
    with ablation.changed(name):
        model = built("literal" if ablation.ABLATIONS[name] == "literal" else False)
        assert_exact(model, HISTORIES)


@pytest.mark.parametrize("name", ablation.ABLATIONS)
def test_a_change_ends_with_its_context(name: str) -> None:
    before = built()
    with ablation.changed(name):
        pass
    for a, b in zip(maps_of(before), maps_of(built()), strict=True):
        assert torch.equal(a, b)


def test_literal_rows_are_renormalised_ones_times_the_gate() -> None:
    """So "renormalised rows with the gate" needs no run of its own."""
    torch.manual_seed(0)
    q, k, var = (torch.randn(3, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    literal, renormalised = (
        attention_weights(q, k, key_var=var.exp(), variant=variant) for variant in ("literal", "renormalised")
    )
    row = literal.sum(-1, keepdim=True)
    assert row.min() < 0.8
    torch.testing.assert_close(renormalised * row, literal)
    gated = ablation.gate(q, k, key_var=var.exp())
    torch.testing.assert_close(gated, attention_weights(q, k) * row)
    assert torch.equal(ablation.gate(q, k), attention_weights(q, k))


def test_the_gate_is_what_the_network_uses() -> None:
    with ablation.changed("gate"):
        first = maps_of(built())[0]
    plain, literal = maps_of(built(False))[0], maps_of(built())[0]
    torch.testing.assert_close(first, plain * literal.sum(-1, keepdim=True))
    assert not torch.allclose(first, literal)


@pytest.mark.parametrize("name", ["constant", "learned"])
def test_a_factor_on_attention_is_one_on_what_its_last_matrix_does(name: str) -> None:
    with ablation.changed(name):
        model = built(False)
        found = model.scores([h for h in HISTORIES if h])
    plain = built(False)
    with torch.no_grad():
        for block, factor in zip(plain.blocks, ablation.MEANS, strict=True):
            attention = block.attention
            assert isinstance(attention, SelfAttention)
            attention.merge.weight.mul_(factor)
    torch.testing.assert_close(found, plain.scores([h for h in HISTORIES if h]))
    gates = [p for n, p in model.named_parameters() if n.endswith("gate")]
    assert len(gates) == (2 if name == "learned" else 0)


def test_shuffled_errors_are_those_of_other_items() -> None:
    with ablation.changed("shuffled"):
        found = built().item_error
    errors = built().item_error
    assert torch.equal(found.sort().values, errors.sort().values) and not torch.equal(found, errors)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no ablation is called 'gait'; there are gate"), ablation.changed("gait"):
        pass
