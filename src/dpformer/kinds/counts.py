"""Transition counts: one noisy release of which items follow which, and no network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpformer.kinds.base import Mechanism, ModelKind
from dpformer.kinds.network import OF_NETWORKS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dpformer.accounting.events import Event
    from dpformer.data.attributes import Attributes
    from dpformer.engines.sums import ArraySums
    from dpformer.evaluation.rankers import Ranker
    from dpformer.findings import Finding
    from dpformer.kinds.scoring import Scoring
    from dpformer.models.counts import TransitionCounts
    from dpformer.models.vectors import Vectors
    from dpformer.queries.transitions.query import TransitionsQuery
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.runs.session import Session
    from dpformer.training.plan import Plan

COUNTED, COUNTED_USERS = 50, 4000  # items per user, and users, of an estimate
FEW = 20  # number of counts at which an honest run looks exact with probability 10⁻⁸


class CountsKind(ModelKind):
    """See `ModelKind`."""

    name = "counts"
    title = "Transition counts"
    phrase = "transition counts"
    summary = "counts: one noisy release of transitions, no network"
    classes = {"TransitionCounts": "dpformer.models.counts"}  # noqa: RUF012
    silent = OF_NETWORKS
    trains = False
    text = False
    counted = True

    # Chosen.

    def ignores(self, option: str, name: str) -> str:
        return f"{option} applies to networks, but model is {name}: omit it, or choose a network with --model"

    def refuse(self, config: Config) -> None:
        super().refuse(config)
        if config.warm_start:
            raise ValueError(f"warm_start applies to networks, but model is {config.model}: omit it")
        if config.noise.correlated:
            raise ValueError(f"{config.noise.choice}, which applies to networks trained with noise: omit it")

    def resolved(self, config: Config, users: int) -> dict[str, Any]:
        return {"reattention": None, "batch_size": None}

    # Planned.

    @property
    def release(self) -> TransitionsQuery:
        from dpformer.queries.transitions.query import TRANSITIONS

        return TRANSITIONS

    def items_described(self, config: Config) -> bool:
        return bool(config.attributes)

    def mechanism(self, config: Config, users: int, others: tuple[Event, ...]) -> Mechanism:
        """One release of all users' transitions, with the whole remaining budget."""
        from dpformer.kinds.planning import calibrated

        if not config.private:
            return Mechanism(users, 0, 0.0)
        noise = calibrated(config, 1.0, 1, others, self.release.failure(config))
        return Mechanism(users, 0, noise, (self.release.event(config, noise),))

    def estimate(self, config: Config, plan: Plan, items: int) -> dict[str, Any]:
        """Seconds and peak bytes, if users have `COUNTED` items each, or the maximum used for training.

        A few users with random histories, popular items first, run through the counting code; noise on pairs without
        data costs the same for them as for all users. The time for summing one user is added for every other user.
        Memory is that of one block of item pairs that occur, a full one in the worst case.
        """
        import numpy as np

        from dpformer.engines.sums import COUNTERS, WINDOW, ArraySums
        from dpformer.progress import peak_memory
        from dpformer.queries.transitions.rounds import release_transition_sums

        users, length = min(plan.users, COUNTED_USERS), min(config.max_length or COUNTED, COUNTED)
        histories = (items ** np.random.default_rng(0).random(users * length)).astype(np.int64) - 1  # Zipf's law
        histories, offsets = np.clip(histories, 0, items - 1), np.arange(0, users * length + 1, length)
        sums = ArraySums.packed(histories, offsets)
        noise = plan.noise_of(self.release.label) or 1.0
        began = time.monotonic()
        release_transition_sums(sums, items, noise * users / plan.users, seed=0)  # proportionally as many pairs survive
        seconds = time.monotonic() - began
        if plan.users > users:
            one = ArraySums.packed(histories[:length], offsets[:2])
            each = max(0.0, _seconds_of_sums(sums, items) - _seconds_of_sums(one, items)) / (users - 1)
            seconds += each * (plan.users - users)
        pairs = min(items * (items - 1) // 2, plan.users * length * WINDOW, COUNTERS)
        return {
            "parameters": None,
            "seconds": seconds,
            "memory": peak_memory() + 4 * plan.users * length + 2 * 16 * pairs,
            "items_a_user": length,
        }

    def effort(self, estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [
            ("time", f"about {estimate['seconds'] / 60:,.1f} min, for {estimate['items_a_user']} items per user"),
            ("memory", f"at most {estimate['memory'] / 2**30:.1f} GiB"),
        ]

    # Fitted.

    def fit(self, session: Session) -> TransitionCounts:
        """Post-processing of the release; takes seconds, so there are no checkpoints."""
        from dpformer.models.counts import TransitionCounts

        released, weight = session.released.value(self.release), session.config.repeat_weight
        return TransitionCounts.from_release(released, session.attributes, repeat_weight=weight)

    # Ranked.

    def ranker(self, model: Any) -> Ranker:
        from dpformer.evaluation.sparse_ranker import SparseRanker
        from dpformer.models.evidence import Evidence

        return SparseRanker.of_counts(Evidence(model))

    def scoring(self, model: Any) -> Scoring:
        from dpformer.kinds.counts_scoring import CountsScoring

        return CountsScoring(model)

    def vectors(self, model: Any, dim: int | None) -> Vectors:
        from dpformer.models.vectors import of_counts

        return of_counts(model, dim)

    # Verified.

    def constants(self, config: Config, plan: Plan, release: Release) -> Finding:
        """Popularity must follow from the frequencies; transition rows must be shrunk, and counts not integers."""
        import numpy as np
        import torch

        from dpformer.findings import Finding
        from dpformer.models.counts import TransitionCounts
        from dpformer.models.history import row_of

        name = "constants of the model"
        if not isinstance(release.model, TransitionCounts) or release.frequencies is None:
            return Finding(name, False, "the file does not contain transition counts with their frequencies")
        popularity = torch.from_numpy(release.frequencies / release.frequencies.sum())
        if not torch.allclose(release.model.popularity.double(), popularity, rtol=1e-4, atol=1e-9):
            return Finding(name, False, "popularity does not follow from the released frequencies")
        own = release.model.chances[row_of(release.model.offsets) == release.model.targets]
        weight = config.repeat_weight
        if len(own) != (len(release.vocabulary) if weight else 0) or (own != torch.tensor(weight)).any():
            return Finding(name, False, "an item follows itself, which is never counted, or not with repeat_weight")
        rows, chances, counts = counts_of(release.model)
        sums = np.bincount(rows, weights=chances, minlength=1)
        if not ((chances > 0).all() and (sums < 1).all()):
            return Finding(name, False, "transition probabilities are not those of noisy counts: a row sums to 1")
        clear = counts[counts * 1e-6 < 1e-3 * (1 - sums[rows])]  # float32 still distinguishes them from integers
        if len(clear) < FEW:  # a noisy count is near an integer with probability 1/50, as is its pair's other count
            return Finding(name, True, "popularity follows from the frequencies; too few counts to test for integers")
        if float((np.abs(clear - np.round(clear)) < 1e-2).mean()) > 0.5:
            return Finding(name, False, "transition counts look exact: they are integers")
        return Finding(name, True, "popularity follows from the frequencies; counts are not integers")

    def follows(
        self, config: Config, value: Any, release: Release, attributes: Attributes | None
    ) -> tuple[bool | None, str]:
        from dpformer.models.counts import TransitionCounts

        found = release.model
        if attributes is None and int(getattr(found, "num_attributes", 0)):
            return None, ("frequencies follow from them; not checked: counts that use attributes (give --catalog)")
        if not _near_pairs_match(value, attributes):
            return False, "the evidence for attributes is about other pairs than those of the catalogue"
        again = TransitionCounts.from_release(value, attributes, repeat_weight=config.repeat_weight)
        names = [tuple(name) for name in getattr(found, "attribute_names", [])]
        same = again.arguments == found.arguments and [tuple(name) for name in again.attribute_names] == names
        if same and all(_equal(tensor, found.state_dict()[key]) for key, tensor in again.state_dict().items()):
            return True, "the model follows from them"
        return False, "the model's counts do not follow from the release"


def _near_pairs_match(value: Any, attributes: Attributes | None) -> bool:
    """Whether the evidence for attributes, if there is any, is about the pairs that the catalogue makes near."""
    from dpformer.data.near_pairs import chance_of, near_pairs

    if attributes is None or value.evidence is None:
        return True
    return bool(value.evidence.chance == chance_of(near_pairs(attributes), attributes.num_items))


def counts_of(model: TransitionCounts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, probability, count) of each transition between two items: T_ab = C_ab / (R_a + prior) solved for C."""
    import numpy as np

    from dpformer.models.counts import ROW_PRIOR

    rows = np.repeat(np.arange(model.num_items), model.offsets.diff().numpy())
    others = rows != model.targets.numpy()
    rows, chances = rows[others], model.chances.numpy().astype(np.float64)[others]
    sums = np.bincount(rows, weights=chances, minlength=1)
    return rows, chances, chances * ROW_PRIOR / np.maximum(1 - sums, 1e-9)[rows]


def _equal(made: Tensor, found: Tensor) -> bool:
    """Equality; for values that back-off sums in any order, up to rounding."""
    import torch

    if not made.is_floating_point():
        return torch.equal(made, found)
    return made.shape == found.shape and bool(torch.isclose(made, found, rtol=1e-5, atol=0).all())


def _seconds_of_sums(sums: ArraySums, items: int) -> float:
    """Seconds for the exact sums of all rounds."""
    import numpy as np

    from dpformer.engines.sums import gathered
    from dpformer.queries.transitions.rounds import ROUNDS

    places = np.arange(items)
    began = time.monotonic()
    sums.items(items)
    cells = gathered(sums.all_pairs(places))[0]
    for this in ROUNDS[1:]:
        sums.pairs(places, cells, this.directed)
    return time.monotonic() - began


COUNTS = CountsKind()
