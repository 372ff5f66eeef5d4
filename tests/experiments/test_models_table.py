"""The table of models: a few of its rows, and how they are written down."""

import warnings

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from experiments.model_adapters import adapters
from experiments.model_cases import families
from experiments.model_layers import layers
from experiments.models_table import Outcome, outcome, page

CASES = {(c.group, c.name): c for c in [*families(), *adapters(), *layers()]}
EXACT = [
    "t5",
    "mixtral",
    "mixtral (batched_mm)",
    "DoRA",
    "LoHa",
    "OFT",
    "prompt tuning",
    "P-tuning",
    "nn.Conv2d",
    "hidden[mask]",
]
REFUSED = {
    "batch normalisation over the batch": ".eval()",
    "torch.compile": "torch.compile",
}


def case(name: str):
    return next(c for (_, known), c in CASES.items() if known == name)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(case(name))
    assert found.verdict in ("exact", "exact, one at a time"), found


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    found = outcome(case(name))
    assert found.verdict == "refused" and REFUSED[name] in found.words, found


def test_names_are_unique() -> None:
    assert len(CASES) == len([*families(), *adapters(), *layers()])


def test_page() -> None:
    text = page([Outcome("layers", "a", "exact", 1e-16), Outcome("layers", "b", "refused", words="no | rule\nhere")])
    assert "1 exact, 1 refused." in text
    assert "| a | exact | 1.0e-16 |" in text and "| b | refused | no \\| rule here |" in text
