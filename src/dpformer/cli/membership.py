"""`dpformer audit RUN --non-members LOG`: a membership attack on the released model, through its answers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dpformer.cli.results import conclude
from dpformer.errors import DpformerError

if TYPE_CHECKING:
    import numpy as np

    from dpformer.data import Dataset
    from dpformer.runs.model_file import Release


def attack(run: Path, non_members: Path, data: Path | None, seed: int | None, as_json: bool) -> None:
    """Reads both logs, attacks, prints; nothing is kept in the run folder, which may be published."""
    from dpformer.cli.train import quiet_threads

    quiet_threads()
    from dpformer.runs.folder import RunFolder
    from dpformer.runs.run import finished
    from dpformer.runs.tasks import task_of
    from dpformer.runs.trust import followed
    from dpformer.verification.audit.membership import attack_membership, disjoint

    done, folder = finished(run), RunFolder.open(run)
    task = task_of(done.config)
    inside = task.read_again(followed(folder, done.config, data), done.release)
    others = followed(folder, done.config, non_members).replace(users=None, cache=None)
    outside = task.read_again(others, done.release)
    disjoint(inside, outside)
    histories = (_histories(dataset, done.release) for dataset in (inside, outside))
    text = done.config.task == "lm"
    conclude(attack_membership(done.release, done.statement, *histories, text=text, seed=seed), _print, as_json)


def _histories(dataset: Dataset, release: Release) -> list[np.ndarray]:
    """What was trained on of each user, in items of the model; those that it does not know are left out."""
    import numpy as np

    known = {str(name): number for number, name in enumerate(release.vocabulary)}
    numbers = np.array([known.get(name, -1) for name in dataset.vocabulary.ids], dtype=np.int64)
    found = (numbers[history] for history in dataset.histories(range(dataset.num_users)))
    return [history[history >= 0] for history in found if len(history)]


def refuse_others(run: Path | None, given: list[str]) -> None:
    """What says nothing of an attack on a released model."""
    if run is None:
        raise DpformerError("--non-members needs RUN: the attack is on its released model")
    if given:
        raise DpformerError(
            f"{given[0]} is for an audit by canaries, and --non-members asks for an attack: leave it out"
        )


def _print(result: Any) -> None:
    from dpformer.format_number import percent

    low, high = map(percent, result.found_between)
    typer.echo(f"members accused       {result.accused_members:,} of {result.members:,}: {low} to {high}")
    alarms = percent(result.false_alarms_at_most)
    typer.echo(f"non-members accused   {result.accused_non_members:,} of {result.non_members:,}: at most {alarms}")
    typer.echo(f"bound on any attack   {percent(result.bound)} of the members at that rate of false alarms")
    facts = result.to_dict()
    typer.echo(f"assumed               {facts['assumes']}")
    typer.echo(f"{facts['note']}\n{result.verdict}")
