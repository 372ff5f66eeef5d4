"""A run, from config to released model: start, resume, open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dpformer.accounting import Ledger
from dpformer.data import Dataset, Vocabulary
from dpformer.data.owner_notes import hints, kept_items
from dpformer.data.sources.urls import resolved, url_of
from dpformer.errors import DpformerError
from dpformer.kinds import auto
from dpformer.noise import SecureRandom
from dpformer.progress import Phases, say
from dpformer.runs.checkpoint import check_data, load_checkpoint
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.keys import keep_key, load_keys, refuse_kept, save_keys
from dpformer.runs.ledger_file import kept, read, reserve, taken_back
from dpformer.runs.model_file import Release, load_release
from dpformer.runs.notes import notes
from dpformer.runs.planning import check_budget, make_plan, with_share, with_share_of_delta
from dpformer.runs.previous import PreviousRun
from dpformer.runs.session import Session
from dpformer.runs.signals import Interrupted
from dpformer.runs.tasks import load_dataset
from dpformer.runs.trust import at_snapshot, is_own, mark_as_own
from dpformer.statement.data import order_line
from dpformer.statement.shape import check_shape
from dpformer.statement.signature import private_key, sign
from dpformer.training.device import device_of
from dpformer.training.plan import Plan

if TYPE_CHECKING:
    from dpformer.training.distributed import Team

__all__ = ["Interrupted", "Run", "finished", "resume", "started_before", "train"]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    config: Config
    statement: dict[str, Any]

    @cached_property
    def release(self) -> Release:
        """The model with its vocabulary and metadata."""
        return load_release(self.folder / "model.safetensors")


def train(
    config: Config,
    out: str | Path,
    team: Team | None = None,
    *,
    key: Path | None = None,
    key_file: Path | None = None,
    ledger: Path | Ledger | None = None,
    source: dict[str, str] | None = None,
) -> Run:
    """Train a model and write the run folder `out`, which must not exist yet.

    Args:
        config: all options.
        out: the run folder.
        team: processes led by this one; the others call `team.follow()`.
        key: private key (PEM, Ed25519) that signs the published files.
        key_file: stores the secret key of the run in this file, so that it can be replayed (`runs.keys`).
        ledger: a file holds one budget over many runs (`ledger_file`): this run is recorded there before anything is
            released, or refused. If the file has a plan and the config no ε, ε is this run's share of the plan. A
            `Ledger` only counts.
        source: name of the data to show, instead of the file it was put into (`order_line`).
    """
    RunFolder(out).refuse_existing()
    refuse_kept(key_file)
    check_budget(config)
    device_of(config.device)  # refuses one that is not there before the data is read
    if config.previous is not None:
        PreviousRun.open(config.previous, config)  # refuses it before the data is read
    budget = read(ledger) if isinstance(ledger, Path) else None
    share = budget is not None and budget.plan is not None and "epsilon" not in config.model_fields_set
    config = with_share_of_delta(config, budget)
    signer = None if key is None else private_key(key)
    random = SecureRandom("run", seed=config.seed)
    phases = Phases()
    with _threads(config.threads) as threads:
        with phases("reading"):
            dataset = load_dataset(config)
        if not config.synthetic:
            _say_of_data(config, dataset, source)
        config, dataset, reason = _decided(config, dataset)
        config = with_attributes(config, dataset.vocabulary).resolve(users=dataset.num_users, threads=threads)
        if share:
            assert budget is not None
            config = with_share(config, budget, dataset.num_users)
            say(f"ε = {config.epsilon:g} is this run's share of the plan")
        if config.previous is not None:
            PreviousRun.open(config.previous, config).refuse_other_sizes(config)
        plan = make_plan(config, dataset.num_users)
        delta = config.delta if config.private and config.seed is None and not config.synthetic else None
        for note in notes(out, dataset, delta, ledger is not None):
            say(f"note: {note}")
        file = _counted(plan, ledger)
        reserved = None if file is None else reserve(file, out, plan.events)
        with taken_back(file, reserved):
            folder = RunFolder.create(out, reason + config.to_toml())
        with folder.lock(), kept(file, out):
            mark_as_own(folder)
            if reserved is not None:
                folder.write_json(folder.budget, reserved.facts())
            save_keys(folder, random, config=config.hash(), data=dataset.hash)  # before anything is released
            if key_file is not None:
                keep_key(key_file, random, processes=1 if team is None else team.size)
            session = Session(folder, config, plan, dataset, random, team=team)
            with phases("release"):
                session.ask()
            if session.released.item_list is not None:
                say(kept_items(dataset, session.released.item_list))
            with phases("training" if config.kind.trains else "model"):
                facts = session.fit_and_release()
            if signer is not None:
                sign(folder, signer)
            say(str(phases))
            return Run(folder.path, config, facts)


def _say_of_data(config: Config, dataset: Dataset, source: dict[str, str] | None) -> None:
    """Report how a log was read and what is unusual about it."""
    if line := order_line({**dataset.description, **(source or {})}):
        say(line)
    if isinstance(dataset, Dataset) and config.task == "recommend":  # not in a cluster
        for hint in hints(dataset, config.user_column, config.item_column):
            say(hint)


def _decided(config: Config, dataset: Dataset) -> tuple[Config, Dataset, str]:
    """The config with `auto` decided, the data cut to the model's length, and a comment for config.toml."""
    if config.model != auto.AUTO:
        return config, dataset, ""
    attributes = dataset.vocabulary.attributes
    config, choice = auto.decide(config, users=dataset.num_users, items=dataset.num_items, attributes=attributes)
    say(f"model: {choice.model}, because {choice.reason} (override with --model)")
    dataset = dataset.with_max_length(config.max_length or config.default_length)
    return config, dataset, f"# model = auto was {choice.model}, because {choice.reason}\n"


def with_attributes(config: Config, vocabulary: Vocabulary) -> Config:
    """The config with `attributes` decided: whether counts use those of the catalogue, if it has any. Public."""
    there = vocabulary.attributes is not None and len(vocabulary.attributes) > 0
    if config.attributes and not there:
        raise DpformerError("attributes need a catalogue with attribute columns: give --catalog, or omit attributes")
    if config.kind.trains and not config.warm_start:
        return config.replace(attributes=None)
    return config if config.attributes is not None else config.replace(attributes=there or None)


def _counted(plan: Plan, ledger: Path | Ledger | None) -> Path | None:
    """The file in which a run must be recorded; a ledger in memory records it immediately."""
    if ledger is None:
        return None
    if not plan.private:
        raise DpformerError("a run without noise, or with seeded noise, cannot be counted in a ledger")
    if isinstance(ledger, Ledger):
        ledger.extend(plan.events)
        return None
    return ledger


def started_before(config: Config, out: str | Path) -> bool:
    """Whether `out` is a run of the same config, which a restarted job finds."""
    folder = RunFolder(out)
    if not folder.config.is_file():
        return False
    saved = Config.make(folder.config)
    given = {name: resolved(value) if isinstance(value, Path) else value for name, value in config}
    return all(value in (None, auto.AUTO) or value == getattr(saved, name) for name, value in given.items())


def resume(path: str | Path, team: Team | None = None, *, file: Path | None = None, key: Path | None = None) -> Run:
    """Resume an interrupted run to the model it would have made; a finished run is left unchanged.

    Nothing is released twice: the keys were saved before any release, so the same values are released again, bit for
    bit; a run that has released something and lost its keys is refused.

    Args:
        path: the run folder.
        team: as for `train`.
        file: the new path of the log, if it was moved; it must hold the same data.
        key: as for `train`.
    """
    folder = RunFolder.open(path)
    config = Config.make(folder.config)
    if file is not None:
        config = config.replace(file=resolved(file))
    signer = None if key is None else private_key(key)
    with folder.lock(), _threads(config.threads):
        if not folder.done:
            _go_on(folder, config, team)
        folder.forget_secrets()  # the run may have been killed just before this
        if signer is not None:
            sign(folder, signer)
        return finished(folder.path)


def _go_on(folder: RunFolder, config: Config, team: Team | None) -> None:
    elsewhere = config.engine == "spark" or (config.file is not None and url_of(config.file) is not None)
    if elsewhere and not is_own(folder):
        raise DpformerError(
            f"{folder.path} was not made by you on this machine, and its log is not on it: your credentials are not "
            "used, and no SQL is run, for another person's folder"
        )
    folder.refuse_released(by_steps=config.kind.trains)
    random, state = SecureRandom("run", seed=config.seed), None
    keys = load_keys(folder, config=config.hash())
    if keys is not None:  # otherwise it was interrupted before anything was released
        random = random.with_state(keys["random"])
    if folder.checkpoint.exists():
        state = load_checkpoint(folder.checkpoint, config=config.hash())
        random = random.with_state(state["random"])
    # The folder names the log, and resuming reads it; only the owner's own run may choose where prepared data is
    # written.
    pinned = at_snapshot(folder, config)
    dataset = load_dataset(pinned if is_own(folder) else pinned.replace(cache=None))
    for saved in (keys, state):
        if saved is not None:
            check_data(folder.private, saved["data"], dataset.hash)
    plan = make_plan(config, dataset.num_users)
    if state is not None:
        plan = _same_plan(folder, plan, state)
    elif keys is None:
        save_keys(folder, random, config=config.hash(), data=dataset.hash)
    session = Session(folder, config, plan, dataset, random, state, team)
    session.ask()
    session.fit_and_release()


def _same_plan(folder: RunFolder, due: Plan, state: dict[str, Any]) -> Plan:
    """The plan of a checkpoint, which must equal that of the config."""
    try:
        plan = Plan.from_dict(state["plan"])
        noise = state["trainer"]["optimizer"]["noise_multiplier"]
    except (KeyError, TypeError, ValueError) as error:
        raise DpformerError(f"{folder.checkpoint} holds no plan: {error}") from None
    if plan != due or noise != due.noise_multiplier:
        raise DpformerError(
            f"{folder.checkpoint} was made with another plan than that of config.toml (noise {noise:g} instead of "
            f"{due.noise_multiplier:g}): restore config.toml, or start again with another --out"
        )
    return plan


def finished(path: str | Path) -> Run:
    """Open a finished run."""
    folder = RunFolder.open(path)
    if not folder.done:
        raise DpformerError(f"{folder.path} is not finished; resume with: dpformer train --resume {folder.path}")
    facts = check_shape(folder.read_json(folder.statement), folder.statement)
    return Run(folder.path, Config.make(folder.config), facts)


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """Set the number of threads, which is part of a run: another number changes the order of summation."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
