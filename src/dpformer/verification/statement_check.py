"""Rebuild the statement from its ledger, the config and public facts, and compare it field by field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event, Gaussian
from dpformer.accounting.searches import repeated_epsilon
from dpformer.findings import Finding, short
from dpformer.noise.randomness import KEY_BYTES, SecureRandom
from dpformer.runs.config import Config
from dpformer.runs.keys import commitment, commitment_of
from dpformer.runs.tasks import task_of
from dpformer.runs.tuning import SCORE_NOISE, TUNABLE, restated
from dpformer.statement.build import HASHES, PACKAGES, headline, stated_in, statement, words
from dpformer.statement.build import versions as installed
from dpformer.training.plan import Plan
from dpformer.verification.limits import MOST_EVENTS, MOST_RUNS

CLOSE, CLOSE_VERSIONS = 1e-9, 1e-3  # relative; the latter for accounting and calibration by another version
# A version, and no other text that could be inserted instead: "2.9.1+cpu", "0.2.0.dev3".
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}((a|b|rc|\.post|\.dev)\d{1,4})?(\+(cpu|cu\d{2,3}|rocm\d(\.\d){0,2}))?")
SEEDS = 1000  # number of seeds tried as keys
SHA256 = re.compile("[0-9a-f]{64}")


class StatementCheck:
    """The checks of `privacy.json` that need no data.

    Args:
        config: the config of the run.
        facts: the statement.
        plan: the plan of the config, recalibrated.
        items: the number of items in the released file.
        tokens: the sentence on the vocabulary of a language model.
    """

    def __init__(
        self,
        config: Config,
        facts: dict[str, Any],
        plan: Callable[[], Plan],
        items: Callable[[], int],
        tokens: Callable[[], str],
    ) -> None:
        self.config, self.facts, self.plan, self.items, self.tokens = config, facts, plan, items, tokens
        ours = version("dp-accounting"), version("dpformer")
        theirs = facts["versions"].get("dp-accounting"), facts["versions"].get("dpformer")
        self.close = CLOSE if ours == theirs else CLOSE_VERSIONS

    def checks(self) -> Iterator[Callable[[], Finding]]:
        yield self.statement
        yield self.ledger
        if "budget" in self.facts:
            yield self.budget
        yield self.sentences_on_the_data
        yield self.versions
        yield self.hashes

    def events(self) -> list[Event]:
        """The events of the ledger."""
        events = []
        for described in self.facts["events"]:
            event = dict(described)
            event.pop("epsilon_alone")
            events.append(Event.from_dict(event))
        return events

    def statement(self) -> Finding:
        """Rebuilt from the ledger and the config, it must be identical, including ε."""
        facts, config = self.facts, self.config
        again = statement(
            self.events() if config.private else self.plan().events,
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
            stated=stated_in(facts),
            given=config.items_given,
            prior=facts.get("prior"),
            model=config.model,
            budget=facts.get("budget"),
            commitment=facts.get("key_commitment"),
        )
        again["versions"] = facts["versions"]
        if ("prior" in facts) != (config.previous is not None):
            return Finding("statement", False, "an earlier run is stated without one in config.toml, or the reverse")
        if "tuning" in facts:
            again = restated(again, self._tuning())
        else:
            again["headline"], again["words"] = headline(facts), words(facts)  # with the statement's own digits
        wrong = sorted(
            name
            for name in facts.keys() | again.keys()
            if not same(facts.get(name, _NOTHING), again.get(name, _NOTHING), self.close)
        )
        if wrong:
            name = wrong[0]
            return Finding(
                "statement",
                False,
                f"{name} is {short(facts.get(name))}, but ledger and config give {short(again.get(name))}"
                + (f" (and {', '.join(wrong[1:])})" if wrong[1:] else ""),
            )
        spent = "not private" if facts["epsilon"] is None else f"ε = {again['epsilon']:.6g} from the ledger"
        return Finding("statement", True, f"rebuilt identically; {spent}")

    def _tuning(self) -> dict[str, Any]:
        """The search that selected this run, with everything but its size fixed, and its ε recomputed."""
        tuning, config = self.facts["tuning"], self.config
        if not isinstance(tuning.get("events"), list) or len(tuning["events"]) > MOST_EVENTS:
            raise ValueError("the search has no list of events")
        events = tuple(Event.from_dict(event) for event in tuning["events"])
        if list(events[:-1]) != self.events() or events[-1] != Gaussian(SCORE_NOISE, label="score"):
            raise ValueError("a repetition of the search must be this run and its noisy score")
        runs, candidates = tuning["mean_runs"], tuning["candidates"]
        if type(runs) not in (int, float) or not 1 < runs <= MOST_RUNS:
            raise ValueError(f"the search has {runs!r} runs on average; it must be a number above 1")
        names = [name for name, _ in candidates[0].items()] if candidates else []
        if not names or not set(names) <= set(TUNABLE) or any(list(one) != names for one in candidates):
            raise ValueError("the candidates are not values of tunable settings")
        if not any(all(getattr(config, name) == value for name, value in one.items()) for one in candidates):
            raise ValueError("the settings of this run are not among the candidates")
        if not config.validation:
            raise ValueError("a search is scored on validation items, but this run has none")
        return {
            "candidates": candidates,
            "mean_runs": runs,
            "law": "logarithmic",
            "scored_on": "validation items",
            "events": [event.to_dict() for event in events],
            "delta": config.delta,
            "epsilon": repeated_epsilon(events, runs, config.delta or math.nan),
        }

    def ledger(self) -> Finding:
        """The events must be those that the config requires, with calibrated noise."""
        if not self.config.private:
            return Finding("ledger", self.facts["events"] == [], "no noise, no events")
        planned, found = list(self.plan().events), self.events()
        if [event.label for event in planned] != [event.label for event in found]:
            return Finding("ledger", False, f"it holds {labels(found)}, but the config requires {labels(planned)}")
        for event, due in zip(found, planned, strict=True):
            expected, seen = due.to_dict(), event.to_dict()
            for name in expected.keys() | seen.keys():
                if not same(seen.get(name), expected.get(name), self.close):
                    return Finding(
                        "ledger",
                        False,
                        f"{name} of {event.label} is {seen.get(name)!r}, but {expected.get(name)!r} was planned",
                    )
        return Finding("ledger", True, f"σ, q, T and C match the config ({labels(found)})")

    def budget(self) -> Finding:
        """The ledger of many runs must have spent at least this run, and at most its budget."""
        name, budget = "budget of many runs", self.facts["budget"]
        known = {"epsilon", "delta", "spent", "runs"}
        if budget.keys() not in (known, known | {"entry", "hash"}) or not self.facts["private"]:
            return Finding(name, False, f"{short(budget)} is not the budget of a private run")
        own = self._own(budget["delta"])
        if not (1 - self.close) * own <= budget["spent"] <= budget["epsilon"]:
            return Finding(
                name,
                False,
                f"{budget['spent']:g} of {budget['epsilon']:g} cannot be spent: this run alone costs {own:g}",
            )
        if budget["runs"] == 1 and not same(float(budget["spent"]), own, self.close):
            return Finding(name, False, f"{budget['spent']:g} is spent by one run, which costs {own:g}")
        return Finding(name, None, "plausible; not checked: only the owner has the ledger (dpformer ledger check)")

    def _own(self, delta: float) -> float:
        """ε of this run, or of the search that selected it."""
        if "tuning" not in self.facts:
            return epsilon_of(self.events(), delta)
        tuning = self._tuning()
        return repeated_epsilon([Event.from_dict(event) for event in tuning["events"]], tuning["mean_runs"], delta)

    def sentences_on_the_data(self) -> Finding:
        """They must follow from the config, N and the vocabulary size: nothing in them is measured."""
        due = task_of(self.config).sentences(self.config, self.plan(), self.items(), self.tokens())
        name, found = "sentences on the data", self.facts["data"]
        if found == due:
            return Finding(name, True, "follow from the config")
        odd = [sentence for sentence in found if sentence not in due] or ["one is missing"]
        return Finding(name, False, f"{short(odd[0])} does not follow from the config")

    def versions(self) -> Finding:
        found, due = self.facts["versions"], {*PACKAGES, "python"}
        if found.keys() != due:
            return Finding("versions", False, f"list {short(sorted(found))}, not {', '.join(sorted(due))}")
        odd = next((value for value in found.values() if not VERSION.fullmatch(str(value))), None)
        if odd is not None:
            return Finding("versions", False, f"{short(odd)} is not a version")
        if found == installed():
            return Finding("versions", True, "the installed ones")
        return Finding("versions", None, "well-formed; not checked: other versions are installed here")

    def hashes(self) -> Finding:
        found = self.facts["hashes"]
        odd = sorted(name for name in found.keys() - set(HASHES))
        odd += [name for name, value in found.items() if not SHA256.fullmatch(str(value))]
        if odd:
            return Finding("hashes", False, f"{short(odd[0])} is not a SHA-256 of a run")
        if found.get("config") != self.config.hash():
            return Finding("hashes", False, "config.toml does not match the statement")
        return Finding("hashes", True, "config.toml matches the statement")

    def key_commitment(self) -> Finding:
        """There must be one, and not to a key that can be guessed."""
        name, found = "commitment to the key", self.facts.get("key_commitment")
        if found is None:
            return Finding(name, None, "none: the random numbers cannot be reproduced later")
        if not SHA256.fullmatch(str(found)):
            return Finding(name, False, f"{short(found)} is not a SHA-256")
        if found == commitment_of(bytes(KEY_BYTES)):
            return Finding(name, False, "the key is all zeros, which anyone can guess")
        seed = next((seed for seed in range(SEEDS) if commitment(SecureRandom(seed=seed)) == found), None)
        if seed is not None:
            return Finding(name, False, f"the key is that of seed {seed}, which anyone can guess")
        return Finding(name, True, f"to a key other than those of seeds below {SEEDS:,}; a replay can confirm it")


_NOTHING = object()


def same(found: Any, expected: Any, close: float = CLOSE) -> bool:
    """Equality, approximate for numbers."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name], close) for name in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(same(*pair, close) for pair in zip(found, expected, strict=True))
    if type(found) is float and type(expected) is float:
        return math.isclose(found, expected, rel_tol=close)
    return bool(type(found) is type(expected) and found == expected)


def labels(events: list[Event]) -> str:
    return ", ".join(event.label for event in events) or "nothing"
