"""The built-in data set: generated from a seed, long-tailed, with structure worth learning.

Items have Zipf popularity and belong to genres, arranged in a circle. The next item of a user is of the same genre as
the last one, of the following genre, or any; within a genre it is one of the next three in its series, or any by
popularity. No user gets an item twice. So popularity beats chance, and the last item predicts more than popularity.
"""

import numpy as np

from dpformer.data.dataset import Dataset
from dpformer.data.interactions import Interactions
from dpformer.data.preparation import prepare
from dpformer.data.vocabulary import Vocabulary

GENRES = 12
STAY, FOLLOW = 0.45, 0.40  # same genre, following genre; the rest is any item
SERIES = (0.20, 0.10, 0.05)  # within the same genre: the next three of the series; the rest by popularity
SHORTEST, LONGEST = 12, 40


def synthetic(
    seed: int = 0, users: int = 6000, items: int = 400, *, max_length: int | None = 50, validation: bool = False
) -> Dataset:
    """A data set of `users` sequences of 12 to 40 distinct items; the same for the same arguments."""
    if users < 2 or items < 2 * LONGEST:
        raise ValueError(f"synthetic data needs at least 2 users and {2 * LONGEST} items, not {users} and {items}")
    rng = np.random.default_rng(seed)
    popularity = rng.permutation((np.arange(items) + 8.0) ** -1.3)  # Zipf, with a flattened head
    popularity /= popularity.sum()
    sequences = _walks(rng, popularity, _transitions(popularity), users)
    lengths = rng.integers(SHORTEST, LONGEST + 1, users)
    log = Interactions(
        users=np.repeat(np.arange(users, dtype=np.int32), lengths),
        items=sequences[np.arange(LONGEST) < lengths[:, None]],
        user_ids=[f"user-{user}" for user in range(users)],
        item_ids=[f"item-{item}" for item in range(items)],
        format="synthetic",
    )
    titles = [f"Genre {item % GENRES + 1}, part {item // GENRES + 1}" for item in range(items)]
    catalog = Vocabulary(log.item_ids, titles, "catalog")  # synthetic, so public
    dataset = prepare(log, vocabulary=catalog, max_length=max_length, validation=validation)
    dataset.description["source"] = f"synthetic (seed {seed})"
    return dataset


def _transitions(popularity: np.ndarray) -> np.ndarray:
    """Row i: the distribution of the next item, (items, items). Item i is part i // GENRES of genre i % GENRES."""
    items = np.arange(len(popularity))
    genre = items % GENRES
    step = (genre[None, :] - genre[:, None]) % GENRES  # (items, items): 0 is the same genre, 1 the following
    same = np.where(step == 0, popularity, 0)
    following = np.where(step == 1, popularity, 0)
    law = (STAY * (1 - sum(SERIES))) * same / same.sum(axis=1, keepdims=True)
    law += FOLLOW * following / following.sum(axis=1, keepdims=True)
    law += (1 - STAY - FOLLOW) * popularity
    for ahead, chance in enumerate(SERIES, start=1):
        after = items + ahead * GENRES
        after = np.where(after < len(items), after, after % GENRES)  # the series wraps around
        law[items, after] += STAY * chance
    return law


def _walks(rng: np.random.Generator, popularity: np.ndarray, law: np.ndarray, users: int) -> np.ndarray:
    """(users, LONGEST) int32: random walks that never return to an item."""
    walks = np.empty((users, LONGEST), dtype=np.int32)
    fresh = np.ones((users, len(popularity)))  # 0 for items that a user has had
    everyone = np.arange(users)
    for step in range(LONGEST):
        chances = (popularity if step == 0 else law[walks[:, step - 1]]) * fresh  # (users, items)
        running = np.cumsum(chances, axis=1)
        draw = rng.random((users, 1)) * running[:, -1:]
        walks[:, step] = (running <= draw).sum(axis=1)
        fresh[everyone, walks[:, step]] = 0
    return walks
