"""From interactions to sequences: order, filters, vocabulary, split, access, statement."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Columns, Dataset, Filters, Interactions, Vocabulary, prepare, read_catalog
from dpformer.errors import DpformerError
from dpformer.statement.data import data_statement

rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=60
)


def interactions(table: list[tuple[int, int, int, int]]) -> Interactions:
    users, items, times, ratings = (np.array(column) for column in zip(*table, strict=True))
    names = [str(number) for number in range(13)]
    there, codes = np.unique(users, return_inverse=True)
    ids = [str(user) for user in there]
    return Interactions(codes.astype(np.int32), items.astype(np.int32), ids, names, times, ratings.astype(float))


def sequences(dataset: Dataset) -> dict[str, list[str]]:
    return {
        dataset.user_ids[user]: [
            dataset.vocabulary.ids[item] for item in dataset.items[dataset.offsets[user] : dataset.offsets[user + 1]]
        ]
        for user in range(dataset.num_users)
    }


def naive(table: list[tuple[int, int, int, int]], filters: Filters) -> dict[str, list[str]]:
    """Line by line: raw counts, one pass, stable sort by time. Nobody is lost to a filter."""
    users: dict[str, list[tuple[int, str]]] = {str(row[0]): [] for row in table}
    table = [row for row in table if filters.min_rating is None or row[3] >= filters.min_rating]
    by_user = Counter(row[0] for row in table)
    for user, item, time, _ in table:
        if by_user[user] >= filters.min_user_actions:
            users[str(user)].append((time, str(item)))
    return {user: [item for _, item in sorted(mine, key=lambda pair: pair[0])] for user, mine in users.items()}


@settings(max_examples=150)
@given(rows, st.sampled_from([None, 2.0, 4.0]), st.integers(0, 4))
def test_sequences_against_a_naive_twin(table: list, min_rating: float | None, by_user: int) -> None:
    filters = Filters(min_rating, by_user)
    expected = naive(table, filters)
    try:
        dataset = prepare(interactions(table), filters=filters)
    except DpformerError:
        assert sum(map(bool, expected.values())) < 2 or max(map(len, expected.values())) < 2
        return
    assert sequences(dataset) == expected
    assert list(dataset.vocabulary.ids) == sorted({item for mine in expected.values() for item in mine}, key=int)
    for facts in (dataset.description, {"users": len(expected), "interactions": sum(map(len, expected.values()))}):
        assert (facts["users"], facts["interactions"]) == (dataset.num_users, dataset.num_interactions)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=2, max_size=8),
    st.integers(1, 13),
    st.booleans(),
    st.randoms(),
)
def test_split_and_access_against_a_naive_twin(histories: list, max_length: int, validation: bool, random) -> None:
    dataset = Dataset.from_histories(histories, 9, max_length=max_length, validation=validation)
    trains, tested = [], []
    for user, history in enumerate(histories):
        held_out = (1 + validation) if len(history) >= 3 else 0
        trains.append(history[: len(history) - held_out][-max_length:])
        if held_out:
            tested.append(user)
            assert dataset.test_history(user).tolist() == history[:-1]
            if validation:
                assert dataset.held_out_histories(np.array([user]), "validation")[0].tolist() == history[:-2]
    assert [train.tolist() for train in dataset.histories(range(len(histories)))] == trains
    assert dataset.test_users.tolist() == tested
    assert dataset.test_items.tolist() == [histories[user][-1] for user in tested]
    if validation:
        assert dataset.held_out("validation")[1].tolist() == [histories[user][-2] for user in tested]

    users = np.array([random.randrange(len(histories)) for _ in range(random.randrange(6))], dtype=np.int64)
    batch, lengths = dataset.batch(users)
    assert lengths.tolist() == [len(trains[user]) for user in users]
    for row, user in enumerate(users):
        assert batch[row].tolist() == trains[user] + [0] * (batch.shape[1] - len(trains[user]))
    items, offsets = dataset.packed_train()
    assert items.tolist() == [item for train in trains for item in train]
    assert np.diff(offsets).tolist() == list(map(len, trains))
    parts = [history[: len(history) - ((1 + validation) if len(history) >= 3 else 0)] for history in histories]
    assert dataset.item_counts().tolist() == [sum(part.count(item) for part in parts) for item in range(9)]


def test_what_is_held_out_is_never_trained_on() -> None:
    dataset = Dataset.from_histories([[0, 1, 2], [3, 4], [5]], 9, validation=True)
    assert [train.tolist() for train in dataset.histories(range(3))] == [[0], [3, 4], [5]]
    with pytest.raises(ValueError, match="no held-out item"):
        dataset.test_history(1)
    with pytest.raises(ValueError, match="validation=True"):
        Dataset.from_histories([[0, 1, 2]], 9).held_out("validation")
    with pytest.raises(ValueError, match="'test' or 'validation'"):
        dataset.held_out("train")


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_items_outside_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.8"):
        Dataset.from_histories([[0, bad]], 9)


LOG = interactions([(0, 3, 1, 5), (0, 12, 0, 5), (1, 3, 0, 5), (1, 7, 1, 5), (0, 5, 2, 5)])


def test_a_catalogue_fixes_vocabulary_and_numbers(tmp_path) -> None:
    path = tmp_path / "catalog.csv"
    path.write_text('item_id,title\n99,never seen\n12,"Twelve, the"\n7,\n5,Five\n3,Three\n')
    catalog = read_catalog(path)
    dataset = prepare(LOG, vocabulary=catalog)
    assert dataset.num_items == 5 and dataset.items.tolist() == [1, 4, 3, 4, 2]
    assert dataset.titles is not None and dataset.titles[1] == "Twelve, the"
    assert catalog.title(2) == "7", "no title: the id"
    assert "is a public catalogue" in " ".join(data_statement(dataset.description))
    assert catalog.index([12, "99"]).tolist() == [1, 0]
    with pytest.raises(DpformerError, match="item 'x' is not in the vocabulary"):
        catalog.index(["x"])


def test_items_not_in_the_catalogue(tmp_path) -> None:
    path = tmp_path / "catalog.txt"
    path.write_text("3\n7\n12\n")
    with pytest.raises(DpformerError, match=r"item '5' and 0 other items are not in the catalogue \(1 of 5"):
        prepare(LOG, vocabulary=read_catalog(path))
    dataset = prepare(LOG, vocabulary=read_catalog(path), drop_unknown_items=True)
    assert sequences(dataset) == {"0": ["12", "3"], "1": ["3", "7"]}
    facts = dataset.description["vocabulary"]
    assert (facts["interactions_dropped"], facts["last_items_dropped"]) == (1, 1)
    assert "Interactions with other items, if any, were dropped" in " ".join(data_statement(dataset.description))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("item_id\n1\n1\n", "twice"),
        ("part,name\n1,a\n", "no header with item_id"),
        ("a,b\n1,2\n", "no header with item_id"),
    ],
)
def test_bad_catalogues(tmp_path, text: str, sentence: str) -> None:
    path = tmp_path / "catalog.csv"
    path.write_text(text)
    with pytest.raises(DpformerError, match=sentence):
        read_catalog(path)


def test_numbering_says_nothing_about_who_came_first(tmp_path) -> None:
    lines = ["a x", "a 12", "b 5", "b x", "a 5", "b Y"]
    for number, order in enumerate((lines, lines[::-1])):
        path = tmp_path / f"{number}.txt"
        path.write_text("\n".join(order))
        assert list(prepare(path).vocabulary.ids) == ["5", "12", "Y", "x"]


def test_filters_land_in_the_statement() -> None:
    log = interactions([(0, 3, 1, 5), (0, 12, 0, 5), (1, 3, 0, 5), (1, 12, 1, 5), (0, 5, 2, 1)])
    dataset = prepare(log, filters=Filters(min_rating=4, min_user_actions=2), max_length=7)
    sentences = " ".join(data_statement(dataset.description))
    for words in ("rated below 4", "of users with fewer than 2", "last 7 items", "N = 2,"):
        assert words in sentences
    with pytest.raises(DpformerError, match="filters leave none of"):
        prepare(log, filters=Filters(min_rating=9))


def test_statement_counts_nothing_but_users_and_items() -> None:
    """It is published: data with the same N and items, otherwise other, must have the same sentences."""
    catalog = Vocabulary([str(number) for number in range(13)], policy="catalog")
    one = prepare(interactions([(0, 1, 0, 5), (0, 2, 0, 5), (0, 3, 0, 5), (1, 1, 0, 5)]), vocabulary=catalog)
    other = prepare(interactions([(0, 1, 0, 5), (1, 2, 0, 5), (1, 1, 3, 5)]), vocabulary=catalog)
    assert one.description["split"] != other.description["split"]
    assert data_statement(one.description) == data_statement(other.description)


def test_ratings_are_needed_for_their_filter(tmp_path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,stars,ts\na,1,5,1\na,2,3,2\nb,1,4,1\na,3,4.5,3\n")
    assert sequences(prepare(path, filters=Filters(min_rating=4))) == {"a": ["1", "3"], "b": ["1"]}
    with pytest.raises(DpformerError, match="no column 'points'"):
        prepare(path, filters=Filters(min_rating=4), columns=Columns(rating="points"))
    path.write_text("user_id,item_id,ts\na,1,1\n")
    with pytest.raises(DpformerError, match="no column 'rating'"):
        prepare(path, filters=Filters(min_rating=4))


def test_vocabulary_as_text() -> None:
    words = Vocabulary(["a", "ü", "\ud800"], ["A", "", "x"], "catalog")
    assert Vocabulary.from_json(words.to_json()) == words
    for text in (
        "",
        "{}",
        '{"ids": [1], "titles": null, "policy": "dp"}',
        '{"ids": ["a", "a"], "titles": null, "policy": "dp"}',
    ):
        with pytest.raises(DpformerError, match="not a stored vocabulary"):
            Vocabulary.from_json(text)
