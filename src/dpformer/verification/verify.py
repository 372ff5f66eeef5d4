"""`verify`: whether statement, ledger, config, data and the contents of the released file of a run agree.

The statement is rebuilt from its ledger and the config, and compared word by word; the ledger is compared with what the
config requires, recalibrated; the model file must have the stated hash, and the statement must account for everything
in it. With the data, noisy releases are compared with exact numbers, and the noise must be present. Whatever could not
be checked is reported as *not checked*.

Someone who rewrites config, statement and model consistently can claim anything, unless the statement is signed
(`dpformer.statement.signature`), or the data is available.
"""

from __future__ import annotations

import hmac
import json
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from dpformer.data import Dataset, Vocabulary
from dpformer.errors import DpformerError
from dpformer.files import MOST_METRICS, regular
from dpformer.findings import Finding, run_check, short
from dpformer.noise.mechanisms import noise_of
from dpformer.runs.checkpoint import load_checkpoint
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.planning import make_plan
from dpformer.runs.session import salted
from dpformer.statement.build import DATA_HASH
from dpformer.statement.signature import check_signature
from dpformer.training.plan import Plan
from dpformer.verification.claims import (
    DATA,
    FILES,
    MODEL,
    PUBLISHER,
    RANDOMNESS,
    REPLAY,
    SECRETS,
    STATEMENT,
    Verification,
    assumptions,
    claims,
)
from dpformer.verification.data_check import DataCheck
from dpformer.verification.documents import documents
from dpformer.verification.limits import MOST_STEPS, beyond
from dpformer.verification.released_file import ReleasedFile
from dpformer.verification.replay import Replay
from dpformer.verification.statement_check import StatementCheck, same

__all__ = ["Finding", "Verification", "verify"]


def verify(
    run: str | Path,
    *,
    dataset: Dataset | None = None,
    catalog: Vocabulary | None = None,
    key: Path | None = None,
    replay: Replay | None = None,
) -> Verification:
    """Check a run; nothing in the folder is changed, and no file outside it is read.

    Args:
        run: the run folder.
        dataset: the data of the run, prepared again with all its items, to compare the releases with.
        catalog: the public catalogue of the run, to compare titles.
        key: the public key (PEM, Ed25519) of the expected signer.
        replay: repeats the run, which takes as long as the run did.
    """
    folder = RunFolder.open(run)
    problem = regular(folder.config)
    if problem:
        return Verification("", (Finding("config", False, problem),))
    if not folder.statement.exists():
        return _verify_unfinished(folder)
    problem = regular(folder.statement)
    if problem:
        return Verification("", (Finding("statement", False, problem),))
    facts = folder.read_json(folder.statement)
    headline = str(facts.get("headline", ""))
    try:
        config = Config.make(folder.config)
    except DpformerError as error:
        return Verification(headline, (Finding("config", False, str(error)),))
    if reason := beyond(config, facts):
        return Verification(headline, (Finding("statement", False, reason),))
    checker = _Checker(folder, config, facts, dataset, catalog, key, replay)
    found: dict[str, list[Finding]] = {}
    for claim, check in checker.checks():
        found.setdefault(claim, []).append(run_check(check))
    findings = tuple(finding for some in found.values() for finding in some)
    try:
        said = claims(facts, found)
    # Regardless of the results of the checks so far.
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        findings += (Finding("claims", False, " ".join(f"{type(error).__name__}: {error}".split())[:300]),)
        said = ()
    return Verification(headline, findings, said, assumptions(facts) if said else ())


class _Checker:
    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        facts: dict[str, Any],
        dataset: Dataset | None,
        catalog: Vocabulary | None,
        key: Path | None,
        replay: Replay | None,
    ) -> None:
        self.folder, self.config, self.facts, self.dataset, self.key = folder, config, facts, dataset, key
        self.replay = replay

        def plan() -> Plan:
            return self._plan

        self.file = ReleasedFile(folder.model, config, facts, plan, lambda: self.said.events(), catalog)
        self.said = StatementCheck(config, facts, plan, lambda: self.file.items, self.file.sentence_on_tokens)
        self.data = DataCheck(folder, config, facts, plan, lambda: self.said.events(), self.file, dataset)

    def checks(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
        """Each check with the claim that it supports."""
        for check in self.said.checks():
            yield STATEMENT, check
        for check in self.file.checks():
            yield FILES, check
        yield FILES, lambda: documents(self.folder, self.config, self.facts, lambda: self.file.items)
        yield FILES, self._other_files
        yield DATA, self._data_hash
        yield from self.data.checks()
        yield MODEL, self._steps_taken
        yield SECRETS, self._secrets
        if self.facts.get("private"):
            yield RANDOMNESS, self.said.key_commitment
        if self.replay is not None:
            yield RANDOMNESS, self.replay.key_of_the_run
            yield REPLAY, self.replay.replay
        yield PUBLISHER, self._signature

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self.config, self.facts["users"])

    def _steps_taken(self) -> Finding:
        """metrics.jsonl has one line per step: no more steps may have been taken than are accounted for."""
        if problem := regular(self.folder.metrics, MOST_METRICS):
            return Finding("steps taken", None, f"not counted: {problem}; it is private")
        claimed = self.facts["steps"] or 0
        taken, limit = 0, MOST_STEPS if self.facts["epsilon"] is None else claimed
        with self.folder.metrics.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if "loss" not in record:
                    continue
                taken += 1
                if record["step"] != taken and self.facts["epsilon"] is not None:
                    return Finding(
                        "steps taken", False, f"line {taken:,} of the steps is for step {short(record['step'])}"
                    )
                if taken > limit:
                    return Finding("steps taken", False, f"more than the {limit:,} that are accounted for")
        if self.facts["epsilon"] is None:
            return Finding("steps taken", True, f"{taken:,}, none of them private")
        return Finding("steps taken", taken == claimed, f"{taken:,} in metrics.jsonl, {claimed:,} accounted for")

    def _other_files(self) -> Finding:
        unknown = self.folder.unknown()
        if unknown:
            return Finding("other files", None, f"{short(unknown[0])} does not belong to a run and was not checked")
        return Finding("other files", True, "none")

    def _secrets(self) -> Finding:
        if self.folder.checkpoint.exists():
            return Finding("secrets", False, "checkpoint/ still holds the keys of the finished run: delete it")
        stray = sorted(path.name for path in self.folder.stray_secrets())
        if stray:
            return Finding(
                "secrets",
                False,
                f"checkpoint/ holds {short(stray[0])}, which should not be there after a run has finished",
            )
        private = [path for path in (self.folder.private, self.folder.metrics) if path.exists()]
        readable = [path.name for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077]
        if readable:
            return Finding("secrets", False, f"others can read {', '.join(readable)}, not covered by the guarantee")
        return Finding("secrets", True, "no keys left; files not covered are readable by their owner alone")

    def _data_hash(self) -> Finding:
        """The stated hash must match the data in checkpoint/data.json under its salt, and the data given."""
        if problem := regular(self.folder.data):
            return Finding("hash of the data", None, f"not compared: {problem}; it holds the salt")
        secret = self.folder.read_json(self.folder.data)
        found = salted(bytes.fromhex(secret["salt"]), secret["hash"], secret.get("snapshot"))
        if not hmac.compare_digest(found, str(self.facts["hashes"].get(DATA_HASH))):
            return Finding("hash of the data", False, "the statement is about other data than checkpoint/data.json")
        if self.dataset is None:
            return Finding("hash of the data", None, "as in checkpoint/; not compared: the data was not read")
        agrees = hmac.compare_digest(self.dataset.hash, secret["hash"])
        return Finding("hash of the data", agrees, "data and split are the same" if agrees else "the data has changed")

    def _signature(self) -> Finding:
        """A signature can only be checked with a key: the folder cannot tell whose it is."""
        if self.key is None:
            signed = self.folder.signature.exists()
            said = "present: give --key to check it" if signed else "none: anyone could have written this folder"
            return Finding("signature", None, said)
        wrong = check_signature(self.folder, self.key)
        return Finding("signature", not wrong, wrong or "made by the owner of the key, over every published file")


def _verify_unfinished(folder: RunFolder) -> Verification:
    """The checkpoint of an unfinished run: its plan must match the config, and every step must be counted."""
    headline = "unfinished: nothing has been released"
    if folder.model.exists():
        return Verification("", (Finding("statement", False, "there is a model without a statement"),))
    if not folder.checkpoint.exists():
        return Verification(headline, (Finding("checkpoint", None, "none: no step was taken"),))
    if problem := regular(folder.checkpoint, 2**40):
        return Verification(headline, (Finding("checkpoint", False, problem),))
    config = Config.make(folder.config)
    state = load_checkpoint(folder.checkpoint, config=config.hash())
    return Verification(*_of_checkpoint(headline, config, state))


def _of_checkpoint(headline: str, config: Config, state: dict[str, Any]) -> tuple[str, tuple[Finding, ...]]:
    try:
        plan, trainer = Plan.from_dict(state["plan"]), state["trainer"]
        if reason := beyond(config, {"users": plan.users, "events": [], "hashes": {}, "versions": {}}):
            return headline, (Finding("checkpoint", False, reason),)
        due, optimizer = make_plan(config, plan.users), trainer["optimizer"]
        pairs = {
            "plan": (plan.to_dict(), due.to_dict()),
            "noise multiplier": (optimizer["noise_multiplier"], due.noise_multiplier),
            "clip norm": (optimizer["clip_norm"], due.clip_norm),
            "sample rate": (trainer["batches"]["sample_rate"], due.sample_rate),
            "noise of the batches": (noise_of(trainer["batches"]).settings(), due.noise.settings()),
            "noise of the steps": (noise_of(optimizer).settings(), due.noise.settings()),
            "steps counted": (optimizer["steps"], trainer["step"]),
        }
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        return headline, (Finding("checkpoint", False, " ".join(f"{type(error).__name__}: {error}".split())[:300]),)
    findings = [
        Finding(name, same(seen, wanted), "" if same(seen, wanted) else f"is {short(seen)}, not {short(wanted)}")
        for name, (seen, wanted) in pairs.items()
    ]
    return f"{headline}; {trainer['step']:,} of {plan.steps:,} steps taken", tuple(findings)
