"""Prepared data that another process opens: the histories that process 0 has, or a refusal."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from dpformer.data import Dataset, Vocabulary, load, save
from dpformer.data.restrict_vocabulary import restrict_to_vocabulary
from dpformer.data.shared_store import Store
from dpformer.errors import DpformerError

ITEMS = 9


@pytest.mark.parametrize("listed", [range(ITEMS), [7, 2, 3]], ids=["all items", "those that were released"])
@pytest.mark.parametrize("max_length", [None, 4])
def test_the_histories_of_process_0(tmp_path: Path, listed: list[int], max_length: int | None) -> None:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, ITEMS, length) for length in (1, 2, 3, 4, 12, 30)]
    save(Dataset.from_histories(histories, ITEMS, validation=True), tmp_path / "data")
    dataset = load(tmp_path / "data").with_max_length(max_length)
    vocabulary = Vocabulary([dataset.vocabulary.ids[item] for item in listed])
    store = Store.of(dataset, vocabulary)
    opened = pickle.loads(pickle.dumps(store.open if store else None))()
    expected = restrict_to_vocabulary(dataset, vocabulary)
    for user in range(dataset.num_users):
        np.testing.assert_array_equal(opened.train(user), expected.train(user))


def test_other_data_or_none_is_refused(tmp_path: Path) -> None:
    dataset = Dataset.from_histories([[0, 1, 2], [2, 1]], 3)
    assert Store.of(dataset, dataset.vocabulary) is None  # it is in memory only
    save(dataset, tmp_path / "data")
    store = Store.of(load(tmp_path / "data"), dataset.vocabulary)
    assert store is not None
    (tmp_path / "data").rename(tmp_path / "before")
    with pytest.raises(DpformerError, match="is not intact prepared data"):
        store.open()
    save(Dataset.from_histories([[0, 1, 2], [2, 0]], 3), tmp_path / "data")
    with pytest.raises(DpformerError, match="holds other data than that of process 0"):
        store.open()
