"""One budget for a data set over many runs, in a file: `dpformer train --ledger FILE`.

The file is a chain of entries (`ledger_chain`): the budget, perhaps a plan, then one entry per run with everything it
plans to do to the data, recorded *before* it releases anything, so that after a crash the ledger can only overstate
the spending. A run that fails later stays recorded: its noisy values may have been seen, and `--resume` finishes it at
no further cost. Only a run whose folder could not be created has drawn nothing; a further entry withdraws it. The cost
is the composition of all events of all runs, at the ledger's own δ (`budget`); a run that would exceed ε, or its share
of a plan, is refused, and nothing is released. The entry of a search (`dpformer tune`) holds the events of one
repetition and "mean_runs", the expected number of repetitions.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dpformer.accounting.events import Event
from dpformer.errors import DpformerError
from dpformer.files import MOST_LEDGER, lock_file, read_text, strict_json
from dpformer.format_number import plain, round_up
from dpformer.progress import say
from dpformer.runs.budget import Budget, events_of
from dpformer.runs.folder import RunFolder
from dpformer.runs.ledger_chain import Chain, Draft, Entry, make, opened
from dpformer.statement.sp800_226 import spent_of

BUDGET, PLAN, RUN, TAKEN_BACK = "budget", "plan", "run", "taken back"
JSON_FORMAT = 1  # format of the files before SQLite


def create(path: str | Path, epsilon: float, delta: float, plan: int | None = None) -> Budget:
    """Create a file with a budget and optionally a plan of so many runs; an existing file is refused."""
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1):
        raise DpformerError(f"the budget is ε = {epsilon:g}, δ = {delta:g}; ε must be above 0, δ between 0 and 1")
    drafts: list[Draft] = [(BUDGET, {"epsilon": float(epsilon), "delta": float(delta)})]
    if plan is not None:
        drafts.append(_plan(plan))
    make(Path(path), drafts)
    return read(path)


def set_plan(path: str | Path, runs: int) -> Budget:
    """Plan the number of further runs; the latest plan counts."""
    kind, body = _plan(runs)
    with opened(Path(path), write=True) as chain:
        chain.append(kind, body)
        return _budget(chain, Path(path))


def _plan(runs: int) -> Draft:
    if runs < 1:
        raise DpformerError(f"runs is {runs}; it must be 1 or more")
    return PLAN, {"runs": runs}


def read(path: str | Path) -> Budget:
    """The budget in a file; anything inconsistent is refused."""
    with opened(Path(path)) as chain:
        return _budget(chain, Path(path))


def _budget(chain: Chain, path: Path) -> Budget:
    """The budget that the entries describe."""
    try:
        first, *others = chain.entries
        if first.kind != BUDGET:
            raise ValueError("it does not begin with a budget")
        epsilon, delta = _numbers(first.body)
        runs: dict[int, dict[str, Any]] = {}
        plan: int | None = None
        planned_after = 0
        for entry in others:
            if entry.kind == RUN:
                runs[entry.number] = _run(entry)
            elif entry.kind == TAKEN_BACK:
                del runs[entry.body["entry"]]
            elif entry.kind == PLAN and type(entry.body["runs"]) is int and entry.body["runs"] > 0:
                plan, planned_after = entry.body["runs"], len(runs)
            else:
                raise ValueError(f"entry {entry.number} is of an unknown kind")
        last = chain.entries[-1]
        return Budget(epsilon, delta, tuple(runs.values()), plan, planned_after, last.number, last.hash)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DpformerError(f"{path} is not a readable ledger: {' '.join(str(error).split())[:200]}") from None


def _numbers(body: dict[str, Any]) -> tuple[float, float]:
    epsilon, delta = float(body["epsilon"]), float(body["delta"])
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise ValueError("its budget is invalid")
    return epsilon, delta


def _run(entry: Entry) -> dict[str, Any]:
    """A recorded run, with the number of its entry."""
    body = {name: value for name, value in entry.body.items() if name != "salt"}
    if not _is_run(body):
        raise ValueError("it contains an invalid run")
    return {**body, "entry": entry.number}


def _is_run(body: dict[str, Any]) -> bool:
    means = body.get("mean_runs", 2.0)
    return (
        body.keys() - {"mean_runs"} == {"run", "started", "events"}
        and all(isinstance(body[name], str) for name in ("run", "started"))
        and type(means) in (int, float)
        and 1 < means < math.inf
        and all(events_of(body))
    )


def reserve(path: str | Path, run: str | Path, events: Sequence[Event], mean_runs: float | None = None) -> Budget:
    """Record what a run will do, or refuse it; call this before anything is released.

    With `mean_runs` it is a search, and the events are those of one repetition.
    """
    path = Path(path)
    with opened(path, write=True) as chain:
        budget = _budget(chain, path)
        _refuse_beyond(path, budget, events, mean_runs)
        chain.append(
            RUN,
            {
                "run": str(Path(run).resolve()),
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "events": [event.to_dict() for event in events],
                **({} if mean_runs is None else {"mean_runs": mean_runs}),
            },
        )
        return _budget(chain, path)


def _refuse_beyond(path: Path, budget: Budget, events: Sequence[Event], mean_runs: float | None) -> None:
    spent = budget.spent_with(events, mean_runs) if events else math.inf
    if not spent <= budget.epsilon:
        # An event with a failure probability above the ledger's δ (a released item list) has no finite ε.
        total = round_up(spent) if math.isfinite(spent) else "∞: its δ is not below the ledger's; lower --delta"
        raise DpformerError(
            f"{path} has a budget of ε = {plain(budget.epsilon)} at δ = {budget.delta:g}, of which "
            f"{round_up(budget.spent)} was spent by earlier runs; with this run it would be {total}: lower --epsilon; "
            "nothing was released"
        )
    if problem := budget.refusal(events, mean_runs):
        raise DpformerError(f"{path}: {problem}; nothing was released")


@contextmanager
def taken_back(path: str | Path | None, reserved: Budget | None) -> Iterator[None]:
    """Withdraw a run from the ledger if the body fails before anything was drawn."""
    try:
        yield
    except BaseException:
        if path is not None and reserved is not None:
            with opened(Path(path), write=True) as chain:
                chain.append(TAKEN_BACK, {"entry": reserved.number})
        raise


@contextmanager
def kept(path: str | Path | None, out: str | Path, search: bool = False) -> Iterator[None]:
    """Report that a run stays recorded in the ledger if the body fails."""
    try:
        yield
    except BaseException:
        if path is not None:
            goes_on = f"resume it at no further cost with: dpformer train --resume {out}"
            said = (
                f"note: {path} counts this {'search' if search else 'run'} as spent, because noisy values were drawn "
                f"that someone may have seen; {'it cannot be resumed' if search else goes_on}"
            )
            say(said)
        raise


def convert(path: str | Path) -> Budget:
    """Convert a ledger of an older version (JSON) to a chain in its place; the old file is kept as `….json-before`."""
    path = Path(path)
    with _locked(path):
        drafts = _json_entries(path)
        before = path.with_name(f"{path.name}.json-before")
        if before.exists():
            raise DpformerError(f"{before} already exists: move it away first")
        shutil.copy2(path, before)
        make(path, drafts, replace=True)
    return read(path)


def _json_entries(path: Path) -> list[Draft]:
    try:
        facts = strict_json(read_text(path, MOST_LEDGER))
        if facts.pop("format") != JSON_FORMAT or set(facts) != {"epsilon", "delta", "runs"}:
            raise ValueError("it has other keys")
        _numbers(facts)
        if not all(map(_is_run, facts["runs"])):
            raise ValueError("it contains an invalid run")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise DpformerError(f"{path} is not a ledger of an older version: {said}") from None
    return [(BUDGET, {name: facts[name] for name in ("epsilon", "delta")}), *((RUN, run) for run in facts["runs"])]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file as older versions do, so that none of them writes to it meanwhile."""
    try:
        file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise DpformerError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        lock_file(file, wait=True)
        yield


# Comparison with the runs: rewriting the whole file cannot change what their statements say about it.


def check_runs(path: str | Path, folders: Iterable[str | Path]) -> list[tuple[Path, str]]:
    """For each finished run, what is wrong with its entry in the ledger; empty if that counts it as it was recorded."""
    with opened(Path(path)) as chain:
        counted = {run["entry"]: run for run in _budget(chain, Path(path)).runs}
        named: dict[int, str] = {}  # the model of each entry
        return [(Path(folder), _against(chain, counted, named, RunFolder.open(folder))) for folder in folders]


def _against(chain: Chain, counted: dict[int, dict[str, Any]], named: dict[int, str], folder: RunFolder) -> str:
    facts = folder.read_json(folder.statement)
    known = facts.get("budget")
    if not isinstance(known, dict):
        return "its statement names no ledger"
    if "entry" not in known:
        return "" if _counted(chain, folder) else "the ledger does not count it"  # written by an older version
    number, digest = known["entry"], known.get("hash")
    if type(number) is not int or not 0 <= number < len(chain.entries) or chain.entries[number].hash != digest:
        return f"the ledger does not hold its entry {number} as the run recorded it: it was rewritten or is another one"
    if number not in counted:
        return f"the ledger does not count it: its entry {number} was withdrawn, although the run is finished"
    if counted[number]["events"] != _events_of(facts):
        return f"its entry {number} has other events than its statement"
    if named.setdefault(number, model := repr(facts.get("hashes"))) != model:
        return f"another of these runs, with another model, names the same entry {number}"
    return ""


def _events_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a statement, as a ledger records them."""
    try:
        described = facts["tuning"]["events"] if "tuning" in facts else facts["events"]
        return [{name: value for name, value in event.items() if name != "epsilon_alone"} for event in described]
    except (KeyError, TypeError, AttributeError):
        return []  # never those of a ledger


def _counted(chain: Chain, folder: RunFolder) -> bool:
    return str(folder.path.resolve()) in [entry.body.get("run") for entry in chain.entries if entry.kind == RUN]


def budget_left(ledger: str | Path, folder: Path) -> str:
    """The remaining budget of the data, after all runs that the ledger counts."""
    with opened(Path(ledger)) as chain:
        budget = _budget(chain, Path(ledger))
        if not _counted(chain, RunFolder(folder)):
            raise DpformerError(f"{ledger} does not count {folder}: it belongs to other runs")
    ((_, wrong),) = check_runs(ledger, [folder])
    if wrong:
        raise DpformerError(f"{folder}: {wrong}")
    return spent_of(budget.facts())
