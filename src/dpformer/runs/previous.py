"""An earlier run whose counts are a prior for those of this one, or whose weights it starts from (`--warm-start RUN`).

What it released is public, so using it costs nothing; but the guarantee of this run is then *given* that release. The
statement says so, with the cost of all these runs together for a user who was in the data of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpformer.errors import DpformerError
from dpformer.kinds.network import NetworkKind
from dpformer.models.sequence import SequenceModel
from dpformer.queries.popularity import FEWEST_ITEMS
from dpformer.queries.released import Released
from dpformer.queries.transitions.prior import Prior, combined
from dpformer.queries.transitions.query import TRANSITIONS
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import load_release, sha256_of
from dpformer.runs.planning import make_plan
from dpformer.runs.releases_file import load_releases
from dpformer.statement.shape import check_shape


@dataclass(frozen=True)
class PreviousRun:
    """A finished private run of the same kind of model; anything else is refused."""

    folder: RunFolder
    config: Config
    statement: dict[str, Any]

    @classmethod
    def open(cls, path: Path, now: Config) -> PreviousRun:
        """The run at a path, for one with the config `now`."""
        folder = RunFolder.open(path)
        if not folder.done:
            raise DpformerError(f"warm_start is {path}, which is not finished: give a finished run")
        facts, config = check_shape(folder.read_json(folder.statement), folder.statement), Config.make(folder.config)
        if not facts["private"]:
            raise DpformerError(f"warm_start is {path}, which is not private: it would void the guarantee")
        if config.kind is not now.kind:
            kind = now.kind.name
            raise DpformerError(f"warm_start is {path}, a run of {config.model}; give a run of {kind}, as this one is")
        name, used = ("releases", folder.releases) if config.kind.counted else ("model", folder.model)
        if not used.is_file() or sha256_of(used) != facts["hashes"].get(name):
            raise DpformerError(f"{used} is missing, or does not match its statement: restore it")
        return cls(folder, config, facts)

    def refuse_other_sizes(self, now: Config) -> None:
        """Refuse a resolved config whose network cannot have the weights of this one."""
        if not isinstance(now.kind, NetworkKind):
            return
        with torch.random.fork_rng(devices=[]):
            sizes = now.kind.build(now, FEWEST_ITEMS).arguments
        earlier = load_release(self.folder.model).model.arguments
        for size, due in sizes.items():
            if size not in ("num_items", "dropout") and earlier.get(size) != due:
                raise DpformerError(
                    f"warm_start is {self.folder.path}, whose {size} is {earlier.get(size)}, but here it is {due}: "
                    "give the same"
                )

    def prior(self, ids: Sequence[str], users: int) -> Prior:
        """Its counts, with those of the runs before it, for a run with these items and public number of users."""
        arrays, then = load_releases(self.folder.releases), self.statement["users"]
        try:
            found = TRANSITIONS.restore(arrays, self.config, make_plan(self.config, then))
        except (KeyError, ValueError) as error:
            raise DpformerError(f"{self.folder.releases} is not the release of its run: {error}") from None
        names = [str(name) for name in load_release(self.folder.model).vocabulary]
        return Prior.of(combined(found), names, ids, users / then)

    def start(self, model: SequenceModel, ids: Sequence[str]) -> None:
        """Give a network with these items its weights; items that it did not have keep theirs."""
        earlier = load_release(self.folder.model)
        numbers = {str(name): number for number, name in enumerate(earlier.vocabulary)}
        model.continue_from(earlier.model, torch.tensor([numbers.get(str(name), -1) for name in ids]))

    def facts(self) -> dict[str, Any]:
        """For the statement of the next run: all earlier runs of the chain."""
        earlier = self.statement.get("prior", {"runs": 0, "delta": 0.0, "events": []})
        return {
            "runs": earlier["runs"] + 1,
            "statement": sha256_of(self.folder.statement),
            "delta": earlier["delta"] + self.statement["delta"],
            "events": [*earlier["events"], *self.statement["events"]],
        }


def with_prior(released: Released, config: Config, ids: Sequence[str], users: int) -> Released:
    """The results of the queries, with the counts of the earlier run that the config names, if any."""
    if config.previous is None or not config.kind.counted:
        return released
    counts = released.value(TRANSITIONS)
    prior = PreviousRun.open(config.previous, config).prior(ids, users)
    return replace(released, values={**released.values, TRANSITIONS.label: replace(counts, prior=prior)})
