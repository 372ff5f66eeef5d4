"""Vectors in a catalogue: which columns are, which items are near, and counts that recommend by them."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpformer.accounting.ledger import Ledger
from dpformer.data import read_catalog
from dpformer.data.attributes import NEAR_BY
from dpformer.data.vectors import NEIGHBOURS, near_by, vectors_of
from dpformer.errors import DpformerError
from dpformer.models import TransitionCounts

ITEMS, GROUPS = 120, 4


def vectors() -> np.ndarray:
    """Items of a group have similar directions and any length."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(GROUPS, 16))
    spread = centres[np.arange(ITEMS) % GROUPS] + 0.2 * random.normal(size=(ITEMS, 16))
    return np.asarray(spread * random.uniform(0.1, 9, size=(ITEMS, 1)))


def test_the_members_of_an_item_are_those_of_the_largest_cosine() -> None:
    values, ids = vectors(), [f"i{item}" for item in range(ITEMS)]
    facts = near_by("image", values, ids)
    directions = values / np.linalg.norm(values, axis=1, keepdims=True)
    for anchor in range(ITEMS):
        order = np.argsort(-(directions @ directions[anchor]))[: NEIGHBOURS + 1]
        members = {item for item in range(ITEMS) if (f"{NEAR_BY}image", f"i{anchor}") in facts[item]}
        assert anchor in members and len(members) == NEIGHBOURS + 1
        assert len(members & set(order.tolist())) >= NEIGHBOURS, "rounding may swap the last two"


@pytest.mark.parametrize("scale", [1e-200, 3.0, 1e200])
def test_lengths_do_not_matter_and_ties_go_to_the_first(scale: float) -> None:
    same = np.tile([0.5, -0.25, 1.0, 0.125], (40, 1)) * scale
    facts = near_by("v", same, [str(item) for item in range(40)])
    assert [item for item in range(40) if (f"{NEAR_BY}v", "30") in facts[item]] == [*range(20), 30]


def test_what_is_a_column_of_vectors() -> None:
    assert vectors_of([[0.5, 1, 2, 3], None, [1.0, 2.0, 3.0, 4.0]]) is not None
    assert vectors_of([[1, 2, 3, 4], [5, 6, 7, 8]]) is None, "integers are values"
    assert vectors_of([[0.5, 1.0], [0.1, 2.0]]) is None and vectors_of([[0.5] * 4, [0.5] * 5]) is None
    assert vectors_of(["a", "b"]) is None and vectors_of([None]) is None and vectors_of([["a"] * 4]) is None


def test_items_without_a_direction_have_no_neighbours() -> None:
    values = vectors()[:30]
    values[3], values[4] = 0, np.nan
    facts = near_by("v", values, [str(item) for item in range(30)])
    assert not facts[3] and not facts[4] and len({name for names in facts for name in names}) == 28
    assert near_by("v", values[:1], ["a"]) == [[(f"{NEAR_BY}v", "a")]]


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"item_id": "a", "v": [0.5, 1, 2, 3]}\n{"item_id": "b", "v": [0.5, 1e999, 2, 3]}\n')
    with pytest.raises(DpformerError, match="vector of item 'b' in column 'v' has a value that is not finite"):
        read_catalog(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_counts_recommend_new_items_by_vectors(tmp_path: Path, kind: str) -> None:
    """Nobody has the last items of each group, but their vectors say which they are."""
    path, values = tmp_path / f"items.{kind}", vectors()
    rows = [(f"i{item}", [round(x, 4) for x in values[item].tolist()]) for item in range(ITEMS)]
    if kind == "csv":
        path.write_text("item_id,v\n" + "".join(f'{name},"{vector}"\n' for name, vector in rows))
    else:
        path.write_text("".join(json.dumps({"item_id": name, "v": vector}) + "\n" for name, vector in rows))
    catalog = read_catalog(path)
    assert catalog.attributes is not None and {name for name, _ in catalog.attributes.names} == {f"{NEAR_BY}v"}
    random = np.random.default_rng(1)
    group = random.integers(GROUPS, size=(2000, 1))
    items = (group + GROUPS * random.integers(ITEMS // GROUPS - 3, size=(2000, 6))).ravel()
    model = TransitionCounts.fit(
        items,
        ITEMS,
        3.0,
        offsets=np.arange(0, len(items) + 1, 6),
        attributes=catalog.attributes,
        ledger=Ledger(),
        seed=0,
    )
    new = np.arange(ITEMS - 3 * GROUPS, ITEMS)
    assert not np.isin(items, new).any()
    for wanted in range(GROUPS):
        scores = model.scores([[wanted, wanted + GROUPS]])[0].numpy()
        best = new[np.argsort(-scores[new])][:3]
        assert (best % GROUPS == wanted).all()
