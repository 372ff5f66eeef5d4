"""`verify`: whether a run folder holds together: statement, ledger, config, data, and what the released file contains.

The statement is made a second time, from its ledger and the config, and compared word by word; the ledger is compared
with what the config asks for, calibrated again; the model file is opened and everything in it has to be explained by
the statement. So a number changed in one place does not go unnoticed. There is no signature: who rewrites config,
statement and model consistently can claim anything, and only the owner of the data could tell.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.privacy.events import Event
from dpformer.runs.checkpoint import load_checkpoint
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.planning import make_plan
from dpformer.runs.statement import headline, statement, words
from dpformer.runs.tasks import task_of
from dpformer.runs.tuning import repeated_epsilon, restated
from dpformer.training.plan import Plan
from dpformer.verification.released_file import Finding, ReleasedFile

CLOSE = 1e-9  # relative; what accounting and calibration make is compared to 10⁻³ if another version made it
MOST_USERS = 10**10  # people there are; more would keep the accountant busy for ever


@dataclass(frozen=True)
class Verification:
    """All findings about a run."""

    headline: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "headline": self.headline,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def verify(run: str | Path, *, dataset: Dataset | None = None) -> Verification:
    """Checks a finished run; nothing in the folder is changed.

    Args:
        run: the run folder.
        dataset: the data of the run prepared again, to compare hash, number of users and vocabulary.
    """
    folder = RunFolder.open(run)
    if not folder.done:
        return _verify_unfinished(folder)
    facts = folder.read_json(folder.statement)
    try:
        checker = _Checker(folder, Config.make(folder.config), facts, dataset)
        findings = tuple(_sentence(check) for check in checker.checks())
    except DpformerError as error:
        findings = (Finding("config", False, str(error)),)
    return Verification(str(facts.get("headline", "")), findings)


def _sentence(check: Callable[[], Finding]) -> Finding:
    """A check's finding; what a tampered file makes it trip over is a finding too."""
    try:
        return check()
    except Exception as error:  # a stranger's file can be wrong in any way
        name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
        return Finding(name, False, " ".join(f"{type(error).__name__}: {error}".split())[:300])


class _Checker:
    def __init__(self, folder: RunFolder, config: Config, facts: dict[str, Any], dataset: Dataset | None) -> None:
        self.folder, self.config, self.facts, self.dataset = folder, config, facts, dataset
        accountant = version("dp-accounting"), version("dpformer")
        versions = facts["versions"] if isinstance(facts.get("versions"), dict) else {}
        made_by = versions.get("dp-accounting"), versions.get("dpformer")
        self.close = CLOSE if accountant == made_by else 1e-3
        self.file = ReleasedFile(folder.model, config, facts, lambda: self._plan, self._events)

    def checks(self) -> Iterator[Callable[[], Finding]]:
        yield self._statement
        yield self._ledger
        yield self._config_hash
        yield self._steps_taken
        yield from self.file.checks()
        yield self._metrics
        yield self._secrets
        yield self._data_hash
        yield self._data_facts

    # The statement and its ledger.

    def _events(self) -> list[Event]:
        events = []
        for described in self.facts["events"]:
            event = dict(described)
            event.pop("epsilon_alone")
            events.append(Event.from_dict(event))
        return events

    def _statement(self) -> Finding:
        """Made again from the ledger and the config, it must be the same, ε included."""
        facts, config = self.facts, self.config
        again = statement(
            self._events() if config.private else self._plan.events,
            delta=config.delta if config.delta is not None else math.nan,
            target=config.epsilon,
            clipping=config.clipping,
            clip_norm=config.clip_norm,
            expected_batch_size=config.batch_size or 0,
            users=facts["users"],
            seeded=config.seed is not None,
            data=facts["data"],
            hashes=facts["hashes"],
            unit=task_of(config).unit(config),
            metrics=facts.get("metrics"),
        )
        again["versions"] = facts["versions"]
        if "tuning" in facts:
            again = restated(again, self._tuning())
        else:
            again["headline"], again["words"] = headline(facts), words(facts)  # in the statement's own digits
        wrong = sorted(
            name
            for name in facts.keys() | again.keys()
            if not self._same(facts.get(name, _NOTHING), again.get(name, _NOTHING))
        )
        if wrong:
            name = wrong[0]
            return Finding(
                "statement",
                False,
                f"{name} is {_short(facts.get(name))}, but ledger and config give {_short(again.get(name))}"
                + (f" (and {', '.join(wrong[1:])})" if wrong[1:] else ""),
            )
        spent = "not private" if facts["epsilon"] is None else f"ε = {again['epsilon']:.6g} from the ledger"
        return Finding("statement", True, f"made again, it says the same; {spent}")

    def _tuning(self) -> dict[str, Any]:
        """The search whose winner this is, with its ε worked out again."""
        tuning = self.facts["tuning"]
        events = tuple(Event.from_dict(event) for event in tuning["events"])
        if list(events[:-1]) != self._events() or events[-1].label != "score":
            raise ValueError("the repetitions of tuning are not this run and its score")
        return {**tuning, "epsilon": repeated_epsilon(events, tuning["mean_runs"], tuning["delta"])}

    def _same(self, found: Any, expected: Any) -> bool:
        return _same(found, expected, self.close)

    @cached_property
    def _plan(self) -> Plan:
        users = self.facts["users"]
        if type(users) is not int or not 1 <= users <= MOST_USERS:
            raise ValueError(f"users is {_short(users)}; it must be a whole number up to {MOST_USERS:,}")
        return make_plan(self.config, users)

    def _ledger(self) -> Finding:
        """The events are those that the config asks for, with the noise that calibration gives."""
        if not self.config.private:
            return Finding("ledger", self.facts["events"] == [] or False, "no noise, no events")
        planned, found = list(self._plan.events), self._events()
        if [event.label for event in planned] != [event.label for event in found]:
            return Finding("ledger", False, f"it holds {_labels(found)}, the config asks for {_labels(planned)}")
        for event, due in zip(found, planned, strict=True):
            expected, seen = due.to_dict(), event.to_dict()
            for name in expected.keys() | seen.keys():
                if not self._same(seen.get(name), expected.get(name)):
                    return Finding(
                        "ledger",
                        False,
                        f"{name} of {event.label} is {seen.get(name)!r}, planned was {expected.get(name)!r}",
                    )
        return Finding("ledger", True, f"σ, q, T and C are those of the config ({_labels(found)})")

    def _config_hash(self) -> Finding:
        same = self.facts["hashes"].get("config") == self.config.hash()
        return Finding("hash of config.toml", same, "" if same else "config.toml is not the one of the statement")

    def _steps_taken(self) -> Finding:
        """metrics.jsonl has a line a step: no more may have been taken than are accounted for."""
        if not self.folder.metrics.exists():
            return Finding("steps taken", None, "metrics.jsonl is not here")
        lines = [json.loads(line) for line in self.folder.metrics.read_text(encoding="utf-8").splitlines()]
        taken = [line["step"] for line in lines if "loss" in line]
        claimed = self.facts["steps"] or 0
        if self.facts["epsilon"] is None:
            return Finding("steps taken", True, f"{len(taken):,}, none of them private")
        right = taken == list(range(1, claimed + 1))
        return Finding("steps taken", right, f"{len(taken):,} in metrics.jsonl, {claimed:,} accounted for")

    def _secrets(self) -> Finding:
        if self.folder.checkpoint.exists():
            return Finding("secrets", False, "checkpoint/ still holds the keys of a run that is done: delete it")
        private = [path for path in (self.folder.private, self.folder.metrics) if path.exists()]
        readable = [path.name for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077]
        if readable:
            return Finding("secrets", False, f"others can read {', '.join(readable)}, not covered by the guarantee")
        return Finding("secrets", True, "no keys left; what is not covered is readable by its owner alone")

    # The data.

    def _metrics(self) -> Finding:
        return self.file.metrics(self.dataset)

    def _data_hash(self) -> Finding:
        """The hash in the statement is of the data in checkpoint/data.json under its salt, and of the data given."""
        if not self.folder.data.exists():
            return Finding("hash of the data", None, "checkpoint/data.json, which holds the salt, is not here")
        secret = self.folder.read_json(self.folder.data)
        salted = hmac.new(bytes.fromhex(secret["salt"]), secret["hash"].encode(), hashlib.sha256).hexdigest()
        if salted not in self.facts["hashes"].values():
            return Finding("hash of the data", False, "the statement is of other data than checkpoint/data.json")
        if self.dataset is None:
            return Finding("hash of the data", True, "as in checkpoint/; the data itself was not read")
        same = hmac.compare_digest(self.dataset.hash, secret["hash"])
        return Finding("hash of the data", same, "data and split are the same" if same else "the data is another now")

    def _data_facts(self) -> Finding:
        if self.dataset is None:
            return Finding("facts on the data", None, "the data was not read")
        if self.dataset.num_users != self.facts["users"]:
            return Finding("facts on the data", False, f"{self.dataset.num_users:,} users, not {self.facts['users']:,}")
        if [str(name) for name in self.file.release.vocabulary] != list(self.dataset.vocabulary.ids):
            return Finding("facts on the data", False, "the vocabulary of the model is not that of the data")
        if self.config.private_vocabulary:  # drawn once, and not described again
            return Finding("facts on the data", True, "users and vocabulary are those of the data")
        sentences = task_of(self.config).sentences(self.dataset)
        described = sentences == self.facts["data"]
        return Finding("facts on the data", described, "" if described else "its sentences do not describe this data")


def _verify_unfinished(folder: RunFolder) -> Verification:
    """The checkpoint of an unfinished run: its plan is that of the config, and every step is counted."""
    config = Config.make(folder.config)
    headline = "unfinished: nothing has been released"
    if not folder.checkpoint.exists():
        return Verification(headline, (Finding("checkpoint", None, "none: no step was taken"),))
    state = load_checkpoint(folder.checkpoint, config=config.hash())
    plan, trainer = Plan.from_dict(state["plan"]), state["trainer"]
    due, optimizer = make_plan(config, plan.users), trainer["optimizer"]
    pairs = {
        "plan": (plan.to_dict(), due.to_dict()),
        "noise multiplier": (optimizer["noise_multiplier"], due.noise_multiplier),
        "clip norm": (optimizer["clip_norm"], due.clip_norm),
        "sample rate": (trainer["batches"]["sample_rate"], due.sample_rate),
        "bands": ((trainer["batches"].get("bands", 1), optimizer.get("bands", 1)), (due.bands, due.bands)),
        "steps counted": (optimizer["steps"], trainer["step"]),
    }
    findings = [
        Finding(name, _same(seen, wanted), "" if _same(seen, wanted) else f"is {_short(seen)}, not {_short(wanted)}")
        for name, (seen, wanted) in pairs.items()
    ]
    return Verification(f"{headline}; {trainer['step']:,} of {plan.steps:,} steps taken", tuple(findings))


_NOTHING = object()


def _same(found: Any, expected: Any, close: float = CLOSE) -> bool:
    """Equal; numbers only nearly."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[name], expected[name], close) for name in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(_same(*pair, close) for pair in zip(found, expected, strict=True))
    if type(found) is float and type(expected) is float:
        return math.isclose(found, expected, rel_tol=close)
    return bool(type(found) is type(expected) and found == expected)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _labels(events: list[Event]) -> str:
    return ", ".join(event.label for event in events) or "nothing"
