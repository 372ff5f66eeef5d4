"""One budget for a data set over many runs, in a file: `dpformer train --ledger FILE`.

    {"format": 1, "epsilon": 10.0, "delta": 1e-06, "runs": [{"run": …, "started": …, "events": […]}, …]}

A run is written down with all it plans to do to the data *before* it releases anything, so a crash can only leave the
ledger saying too much. A run that fails later stays written down: what it drew may have been seen, and `--resume`
brings it to its end at no further cost. Only one whose folder could not be made has drawn nothing, and is taken back.
Processes take turns by a lock, and the file is replaced in one step. What is counted is every event of every run
together, at the ledger's own δ; a run that would go beyond ε is refused, and nothing is released. The entry of a search
(`dpformer tune`) holds the events of one repetition and "mean_runs", how many there are on average.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event
from dpformer.accounting.searches import Search, epsilon_with_searches
from dpformer.data.dataset import Dataset
from dpformer.data.time_split import TimeSplitDataset
from dpformer.errors import DpformerError
from dpformer.files import MOST_LEDGER, lock_file, read_text, strict_json, write_text
from dpformer.format_number import plain, round_up
from dpformer.progress import say
from dpformer.statement.sp800_226 import spent_of

FORMAT = 1
_fitted_here: set[str] = set()  # hashes of the data that this process trained on without a ledger


@dataclass(frozen=True)
class Budget:
    """What a ledger file holds."""

    epsilon: float
    delta: float
    runs: tuple[dict[str, Any], ...] = ()

    @property
    def events(self) -> list[Event]:
        """Of all runs that are no searches."""
        return [event for run in self.runs if "mean_runs" not in run for event in _events(run)]

    @property
    def searches(self) -> list[Search]:
        return [Search(tuple(_events(run)), run["mean_runs"]) for run in self.runs if "mean_runs" in run]

    @property
    def spent(self) -> float:
        """ε of all runs together, at the ledger's δ."""
        if self.searches:
            return epsilon_with_searches(self.events, self.searches, self.delta)
        return epsilon_of(self.events, self.delta) if self.runs else 0.0

    def facts(self) -> dict[str, Any]:
        """What a statement says of it."""
        return {"epsilon": self.epsilon, "delta": self.delta, "spent": self.spent, "runs": len(self.runs)}

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "epsilon": self.epsilon, "delta": self.delta, "runs": list(self.runs)}


def create(path: str | Path, epsilon: float, delta: float) -> Budget:
    """A new file with a budget; one that is there is refused."""
    path = Path(path)
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1):
        raise DpformerError(f"the budget is ε = {epsilon:g}, δ = {delta:g}; ε must be above 0, δ between 0 and 1")
    with _locked(path):
        if path.exists():
            raise DpformerError(f"{path} is already there, and a budget is set once")
        budget = Budget(float(epsilon), float(delta))
        _write(path, budget)
    return budget


def read(path: str | Path) -> Budget:
    """The budget in a file; anything that cannot be believed is refused."""
    path = Path(path)
    if not path.is_file():
        raise DpformerError(f"{path} is no ledger: make one with dpformer ledger {path} --epsilon 10 --delta 1e-6")
    try:
        facts = strict_json(read_text(path, MOST_LEDGER))
        if facts.pop("format") != FORMAT or set(facts) != {"epsilon", "delta", "runs"}:
            raise ValueError("its keys are others")
        budget = Budget(float(facts["epsilon"]), float(facts["delta"]), tuple(facts["runs"]))
        if not (0 < budget.epsilon < math.inf and 0 < budget.delta < 1):
            raise ValueError("its budget is no budget")
        if not all(_is_entry(run) and all(_events(run)) for run in budget.runs):
            raise ValueError("a run in it is not one that was written down here")
        return budget
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DpformerError(f"{path} is not a ledger that can be read: {' '.join(str(error).split())[:200]}") from None


def _is_entry(run: dict[str, Any]) -> bool:
    means = run.get("mean_runs", 2.0)
    return (
        run.keys() - {"mean_runs"} == {"run", "started", "events"}
        and all(isinstance(run[name], str) for name in ("run", "started"))
        and type(means) in (int, float)
        and 1 < means < math.inf
    )


def _events(run: dict[str, Any]) -> list[Event]:
    return [Event.from_dict(event) for event in run["events"]]


def reserve(path: str | Path, run: str | Path, events: Sequence[Event], mean_runs: float | None = None) -> Budget:
    """Writes down what a run will do, or refuses it; to be called before anything is released.

    With `mean_runs` it is a search, and the events are those of one repetition.
    """
    path = Path(path)
    with _locked(path):
        budget = read(path)
        entry = {
            "run": str(Path(run).resolve()),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "events": [event.to_dict() for event in events],
            **({} if mean_runs is None else {"mean_runs": mean_runs}),
        }
        after = Budget(budget.epsilon, budget.delta, (*budget.runs, entry))
        spent = after.spent if events else math.inf
        if not spent <= budget.epsilon:
            # An event that fails outright with more than the ledger's δ (a released list of items) has no ε there.
            total = round_up(spent) if math.isfinite(spent) else "∞: its δ is not below the ledger's, lower --delta"
            raise DpformerError(
                f"{path} has a budget of ε = {plain(budget.epsilon)} at δ = {budget.delta:g}, of which "
                f"{round_up(budget.spent)} is spent by earlier runs; with this one it would be {total}: "
                "lower --epsilon; nothing was released"
            )
        _write(path, after)
        return after


@contextmanager
def taken_back(path: str | Path | None, reserved: Budget | None) -> Iterator[None]:
    """Takes a run back from the ledger if what is inside fails: before anything was drawn."""
    try:
        yield
    except BaseException:
        if path is not None and reserved is not None:
            with _locked(Path(path)):
                budget = read(path)
                left = list(budget.runs)
                left.remove(reserved.runs[-1])  # one, were another process to have reserved the same
                _write(Path(path), Budget(budget.epsilon, budget.delta, tuple(left)))
        raise


@contextmanager
def kept(path: str | Path | None, out: str | Path, search: bool = False) -> Iterator[None]:
    """Says that a run stays in the ledger if what is inside fails."""
    try:
        yield
    except BaseException:
        if path is not None:
            goes_on = f"it goes on at no further cost with: dpformer train --resume {out}"
            said = (
                f"note: {path} counts this {'search' if search else 'run'} as spent, since noisy numbers were drawn "
                f"that somebody may see; {'it cannot go on' if search else goes_on}"
            )
            say(said)
        raise


def notes(out: str | Path, dataset: Dataset, delta: float | None, ledger: bool) -> list[str]:
    """What whoever starts a run should hear: of a large δ, and of runs beside it on the same data, if none counts them.

    Args:
        out: the run folder to be; its neighbours are looked at.
        dataset: what is trained on.
        delta: δ, None without privacy.
        ledger: whether a ledger counts all runs.
    """
    said = delta_notes(delta, dataset.num_users)
    if ledger or delta is None:
        return said
    seen = {path.parents[1]: _hash(path.parents[1]) for path in Path(out).parent.glob("*/checkpoint/data.json")}
    hashes = {dataset.hash}
    if seen or _fitted_here:  # whatever is held out: the users are the same
        whole = dataset.leave_last_out() if isinstance(dataset, TimeSplitDataset) else dataset
        hashes |= {replace(whole, validation=held_out).hash for held_out in (False, True)}
    same = [str(path) for path, found in sorted(seen.items()) if found in hashes]
    if hashes & _fitted_here and not same:
        same = ["an earlier run of this process"]
    _fitted_here.add(dataset.hash)
    if same:
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        said.append(
            f"{same[0]}{more} saw the same data: the budgets of all runs that anybody sees add up; count them with "
            "a ledger (--ledger FILE, ledger=…)"
        )
    return said


def delta_notes(delta: float | None, users: int) -> list[str]:
    """On a δ that is large for so many users."""
    if delta is not None and delta > 1.000001 / users:
        return [
            f"δ = {plain(delta, 3, up=True)} is above 1 / {users:,} users: a mechanism that gives one user's history "
            "away whole would satisfy it; give a smaller delta"
        ]
    if delta is not None and delta > 0.1000001 / users:
        return [f"δ is above 1 / (10 · {users:,} users); NIST SP 800-226 advises a far smaller one: give another delta"]
    return []


def _hash(run: Path) -> str | None:
    try:
        return str(json.loads((run / "checkpoint" / "data.json").read_text(encoding="utf-8"))["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, budget: Budget) -> None:
    write_text(path, json.dumps(budget.to_dict(), indent=2) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of it when the process ends, however it ends."""
    try:
        file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise DpformerError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        lock_file(file, wait=True)
        yield


def budget_left(ledger: str | Path, folder: Path) -> str:
    """What a ledger says of the budget of the data, after all runs that it counts."""
    budget = read(ledger)
    if str(folder.resolve()) not in [run["run"] for run in budget.runs]:
        raise DpformerError(f"{ledger} does not count {folder}: it is the ledger of other runs")
    return spent_of(budget.facts())
