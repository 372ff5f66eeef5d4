"""Private tuning: a random number of runs, a noisy score for each, and only the best one is kept.

Trying settings on the data and keeping the best leaks through the choice: ten runs of ε = 5 cost 23.7 if all are seen.
If the *number* of runs is drawn from the logarithmic distribution, P(K = k) ∝ (1 − γ)^k / k, every score is private,
and only the best run is published, the cost is far lower (Papernot and Steinke 2022, by Rényi accounting;
`RepeatAndSelectDpEvent`): about 7.7, 8.9 or 9.9 for 3, 10 or 30 runs on average.

One repetition chooses a candidate at random, trains it, and scores it on held-out validation items with noise. All
candidates must cost the same, so only settings that do not affect the accounting can be tuned. The number of
repetitions stays secret: given K, the guarantee would be another.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.accounting.attack_rates import attack_rates_of_search
from dpformer.accounting.events import Event, Gaussian
from dpformer.accounting.searches import Search, repeated_epsilon
from dpformer.errors import DpformerError
from dpformer.files import read_text, write_text
from dpformer.format_number import plain, round_up
from dpformer.kinds.registry import trained_names
from dpformer.noise.randomness import SecureRandom
from dpformer.progress import say
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.keys import refuse_kept
from dpformer.runs.ledger_file import kept, reserve, taken_back
from dpformer.runs.model_file import load_release, save_release, sha256_of
from dpformer.runs.notes import notes
from dpformer.runs.planning import check_budget, make_plan
from dpformer.statement import sp800_226
from dpformer.statement.build import headline, words
from dpformer.statement.signature import private_key, sign

SCORE_NOISE = 20.0  # in units of one user's contribution to the score
TUNABLE = (
    "dim", "heads", "blocks", "dropout", "norm", "shared", "reattention_variant", "reattention_scale", "clipping",
    "clip_norm", "learning_rate", "weight_decay", "warmup",
)  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """What will be tried, and the total cost. Everything here is public."""

    candidates: tuple[dict[str, Any], ...]
    mean_runs: float
    events: tuple[Event, ...]  # events of one repetition, including the score
    delta: float
    epsilon: float  # of the whole search

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": list(self.candidates),
            "mean_runs": self.mean_runs,
            "law": "logarithmic",
            "scored_on": "validation items",
            "events": [event.to_dict() for event in self.events],
            "delta": self.delta,
            "epsilon": self.epsilon,
        }


def plan_tuning(config: Config, choices: dict[str, list[Any]], mean_runs: float, users: int) -> Tuning:
    """The cost of a search over all combinations of `choices`; refuses what cannot be accounted for."""
    _refuse(config, choices, mean_runs)
    candidates = tuple(dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    configs = [config.replace(**candidate) for candidate in candidates]  # each is validated; none changes the cost
    plan = make_plan(configs[0].resolve(users=users, threads=1), users)
    events = (*plan.events, Gaussian(SCORE_NOISE, label="score"))
    return Tuning(candidates, mean_runs, events, plan.delta, repeated_epsilon(events, mean_runs, plan.delta))


def logarithmic_gamma(mean: float) -> float:
    """γ of the logarithmic distribution with this mean: (1/γ − 1) / ln(1/γ)."""
    low, high = 1e-12, 1 - 1e-9
    for _ in range(200):
        middle = math.sqrt(low * high)
        if (1 / middle - 1) / math.log(1 / middle) > mean:
            low = middle
        else:
            high = middle
    return high  # rounded so that the mean is never above the accounted one


def draw_runs(mean: float, uniform: float) -> int:
    """K from the logarithmic distribution, by inversion of a uniform number in [0, 1)."""
    gamma = logarithmic_gamma(mean)
    k, term = 1, (1 - gamma) / math.log(1 / gamma)
    while uniform >= term and k < 1_000_000:
        uniform -= term
        term *= (1 - gamma) * k / (k + 1)
        k += 1
    return k


Trial = Callable[[Config, Path], float]  # trains into a folder and returns a noisy score


def tune(
    config: Config,
    choices: dict[str, list[Any]],
    out: str | Path,
    *,
    mean_runs: float = 10.0,
    trial: Trial | None = None,
    announce: Callable[[Tuning], None] = lambda _: None,
    key: Path | None = None,
    key_file: Path | None = None,
    ledger: Path | None = None,
) -> dict[str, Any]:
    """Tune and keep the best run in the run folder `out`; returns its statement, which states the ε of the search.

    Args:
        config: all other settings; its `epsilon` applies to one run.
        choices: setting → values to try, in all combinations.
        out: the run folder to create.
        mean_runs: expected number of runs.
        trial: trains and scores one candidate; by default `train_and_score`.
        announce: called with the plan before any data is touched.
        key: private key (PEM, Ed25519) that signs the published files of the best run.
        key_file: stores the secret key of the best run, so that it can be replayed.
        ledger: file with one budget over many runs: the whole search is recorded there first, or refused.
    """
    folder = RunFolder(out)
    folder.refuse_existing()
    refuse_kept(key_file)
    signer = None if key is None else private_key(key)
    config = config.replace(validation=True)
    _refuse(config, choices, mean_runs)
    from dpformer.runs.tasks import load_dataset

    dataset = load_dataset(config)
    tuning = plan_tuning(config, choices, mean_runs, dataset.num_users)
    announce(tuning)
    for said in notes(out, dataset, tuning.delta, ledger is not None):
        say(f"note: {said}")
    random = SecureRandom("tuning")
    reserved = None if ledger is None else reserve(ledger, out, tuning.events, mean_runs)
    with taken_back(ledger, reserved):
        workshop = folder.beside(".tuning")
    try:
        with kept(ledger, out, search=True):
            best = _search(config, tuning, workshop, random, trial or train_and_score)
            facts = restate(best, tuning.to_dict(), None if reserved is None else reserved.facts())
            if signer is not None:
                sign(RunFolder(best), signer)
            if key_file is not None:
                write_text(key_file, read_text(_key_beside(best)), private=True)
            best.rename(folder.path)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)  # the other runs, and everything about them
    return facts


def _search(config: Config, tuning: Tuning, workshop: Path, random: SecureRandom, trial: Trial) -> Path:
    runs = draw_runs(tuning.mean_runs, int(random.words(1, step=0)[0]) / 2**64)
    best, highest = None, -math.inf
    for number in range(runs):
        pick = int(random.words(1, step=1 + number)[0] % np.uint64(len(tuning.candidates)))
        folder = workshop / str(number)
        score = trial(config.replace(**tuning.candidates[pick]), folder)
        loser = folder
        if best is None or score > highest:
            loser, best, highest = best or workshop / "none", folder, score
        shutil.rmtree(loser, ignore_errors=True)  # no one ever sees it
    assert best is not None
    return best


def train_and_score(config: Config, out: Path) -> float:
    """Train one candidate; its score is the metric for model comparison, on validation items, with noise.

    Prints nothing: the number of candidates tried, and the results of the others, must stay hidden for the guarantee.
    """
    from dpformer.evaluation.metrics import headline
    from dpformer.kinds.ranking import served_ranks
    from dpformer.queries.metrics import release_metrics
    from dpformer.runs.run import train
    from dpformer.runs.tasks import load_dataset

    with redirect_stderr(io.StringIO()):
        run = train(config, out, key_file=_key_beside(out))
        dataset = load_dataset(run.config)
        found = served_ranks(run.release.model, dataset, "validation", filter_seen=config.filter_seen)
    scored = release_metrics(found.ranks, SCORE_NOISE, filter_seen=config.filter_seen, label="score")
    return scored.values[headline().label()]


def _key_beside(run: Path) -> Path:
    """Where the key of a repetition is stored until the search is over."""
    return run.with_name(f"{run.name}.key")


def restated(facts: dict[str, Any], tuning: dict[str, Any]) -> dict[str, Any]:
    """The statement of the best run, with the ε of the whole search."""
    changed = {**facts, "epsilon": tuning["epsilon"], "epsilon_one_run": facts["epsilon"], "tuning": tuning}
    changed["accountant"] = "Rényi differential privacy (dp-accounting), repeated a random number of times and selected"
    search = Search(tuple(Event.from_dict(event) for event in tuning["events"]), tuning["mean_runs"])
    changed["attack"] = attack_rates_of_search(search, tuning["delta"]).to_dict()
    changed[sp800_226.NAME] = sp800_226.nist_fields(changed)
    sentence = (
        f"Settings were tuned on the same data: {plain(tuning['mean_runs'])} runs on average, their number drawn at "
        "random, scored with noise, and only the best one kept. The ε above covers the whole search; one run alone "
        f"has ε = {round_up(facts['epsilon'])}."
    )
    return {**changed, "headline": headline(changed), "words": [*words(changed), sentence]}


def restate(run: Path, tuning: dict[str, Any], budget: dict[str, Any] | None) -> dict[str, Any]:
    """Write the statement of the best run, and its metadata, with the ε of the search."""
    folder = RunFolder(run)
    said = folder.read_json(folder.statement)
    facts = restated(said if budget is None else {**said, "budget": budget}, tuning)
    release = load_release(folder.model)
    metadata = {**release.metadata, **{name: facts[name] for name in ("headline", "epsilon")}}
    save_release(
        folder.model,
        release.model,
        vocabulary=release.vocabulary,
        titles=release.titles,
        metadata=metadata,
        frequencies=release.frequencies,
    )
    facts["hashes"]["model"] = sha256_of(folder.model)
    folder.write_json(folder.statement, facts)
    return facts


def _refuse(config: Config, choices: dict[str, list[Any]], mean_runs: float) -> None:
    """Refuse anything that would make the stated ε wrong."""
    if not config.private:
        raise DpformerError("epsilon is inf: tuning without privacy needs no accounting; compare runs yourself")
    check_budget(config)
    if config.seed is not None:
        raise DpformerError(
            "tuning with a seed is not private: anyone who knows the seed can repeat the search; omit it"
        )
    if config.evaluate_every:
        raise DpformerError("evaluate_every shows exact metrics of every run, but scores must be noisy: omit it")
    if config.items_policy == "dp":
        raise DpformerError(
            "an item list released from the data spends δ in every run, which this analysis does not cover: give "
            "--catalog, or --assume-items-public"
        )
    if not config.kind.trains:
        raise DpformerError(f"{config.kind.name} have no settings to tune: give --model {trained_names()}")
    if not (math.isfinite(mean_runs) and mean_runs > 1):
        raise DpformerError(f"mean_runs is {mean_runs:g}; it must be above 1")
    if not choices or not all(choices.values()):
        raise DpformerError("there is nothing to try: give a setting with its values, such as learning_rate=1e-3,3e-3")
    for name in choices:
        if name not in TUNABLE:
            raise DpformerError(f"{name} cannot be tuned: only {', '.join(TUNABLE)} leave the cost of a run unchanged")
