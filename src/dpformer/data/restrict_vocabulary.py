"""Training data if the item list was released from the data: the released items of each user's training part.

The split is made before, from each user's own rows: the last item of a user is held out whether or not it was
released, so accuracy is measured on all users, and an item that was not released cannot be recommended and counts as
a miss. Users without any released item stay, with empty histories: the number of users is public, and must not depend
on the release.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpformer.data.dataset import Dataset, _ranges
from dpformer.data.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class RestrictedDataset(Dataset):
    """Training parts over a released vocabulary. It holds nothing out, since the split was made before."""

    @cached_property
    def train_stops(self) -> np.ndarray:
        return self.offsets[1:]


def restrict_to_vocabulary(dataset: Dataset, vocabulary: Vocabulary) -> Dataset:
    """The training part of a data set restricted to a released vocabulary; unchanged if nothing is missing."""
    if list(vocabulary.ids) == list(dataset.vocabulary.ids):
        return dataset
    numbers = vocabulary.match(list(dataset.vocabulary.ids))
    starts = dataset.offsets[:-1]
    rows = _ranges(starts, dataset.train_stops - starts)
    items = numbers[dataset.items[rows]]
    ends = np.concatenate([[0], np.cumsum(dataset.train_stops - starts)])
    before = np.concatenate([[0], np.cumsum(items >= 0)])
    weights, sessions = (
        None if marks is None else marks[rows[items >= 0]] for marks in (dataset.weights, dataset.sessions)
    )
    return RestrictedDataset(
        items=items[items >= 0].astype(np.int32),
        offsets=before[ends].astype(np.int64),
        user_ids=dataset.user_ids,
        vocabulary=vocabulary,
        max_length=dataset.max_length,
        description=dataset.description,
        weights=weights,
        sessions=sessions,
    )
