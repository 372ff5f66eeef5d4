"""`dpformer tune`: the law of the number of runs, what is kept, what is stated, what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as pems
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dp_accounting import dp_event, rdp
from scipy import stats
from typer.testing import CliRunner

from dpformer.accounting import Gaussian, PoissonGaussian
from dpformer.accounting.searches import repeated_epsilon
from dpformer.cli import app
from dpformer.errors import DpformerError
from dpformer.kinds.ranking import served_ranks
from dpformer.noise import SecureRandom
from dpformer.queries.metrics import release_metrics
from dpformer.runs import Config, ledger_file, load_release, train, tuning
from dpformer.runs.tasks import load_dataset
from dpformer.runs.tuning import draw_runs, logarithmic_gamma, plan_tuning, tune
from dpformer.verification.verify import verify
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

# The law.


@pytest.mark.parametrize("mean", [1.5, 3.0, 10.0, 30.0])
def test_the_number_of_runs_has_the_logarithmic_law(mean: float) -> None:
    gamma = logarithmic_gamma(mean)
    law = [(1 - gamma) ** k / (k * math.log(1 / gamma)) for k in range(1, 20_000)]
    assert sum(law) == pytest.approx(1, abs=1e-6)
    assert sum(k * p for k, p in enumerate(law, 1)) == pytest.approx(mean, rel=1e-3)
    drawn = [draw_runs(mean, u) for u in (np.arange(2000) + 0.5) / 2000]
    for k in (1, 2, 3):
        assert drawn.count(k) / 2000 == pytest.approx(law[k - 1], abs=1e-3)


def test_the_cost_is_that_of_the_paper_on_tuning() -> None:
    """ε = 5 a run (PLD): 7.65, 8.89, 9.87 for 3, 10, 30 runs on average (Papernot and Steinke; RDP)."""
    event = PoissonGaussian(3.2923, 1024 / 6040, 590, label="training")
    for mean, epsilon in ((3, 7.65), (10, 8.89), (30, 9.87)):
        assert repeated_epsilon((event,), mean, 1 / 6040) == pytest.approx(epsilon, abs=0.01)
        assert repeated_epsilon((event, Gaussian(20.0, label="score")), mean, 1 / 6040) < epsilon + 0.03


# The search.


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny_config(write_log(tmp_path / "log.csv", users=80), seed=None, epochs=1)


def force_runs(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    monkeypatch.setattr(tuning, "draw_runs", lambda mean, uniform: runs)


def test_only_the_winner_is_kept_and_states_the_whole_search(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means: list[float] = []
    monkeypatch.setattr(tuning, "draw_runs", lambda mean, uniform: means.append(mean) or 3)
    scores, rates = iter([0.1, 0.4, 0.3]), []

    def trial(candidate: Config, folder: Path) -> float:
        assert candidate.seed is None and candidate.validation
        rates.append(train(candidate, folder).config.learning_rate)
        return next(scores)

    facts = tune(config, {"learning_rate": [1e-3, 2e-3, 4e-3]}, tmp_path / "run", mean_runs=5, trial=trial)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "run"], "nothing of the losers is left"
    assert Config.make(tmp_path / "run" / "config.toml").learning_rate == rates[1]
    assert facts == json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert facts["epsilon"] > 4 >= facts["epsilon_one_run"] and "tuned on the same data" in facts["words"][-1]
    assert f"ε = {math.ceil(facts['epsilon'] * 1000) / 1000:g}" in facts["headline"]
    assert "runs" not in facts["tuning"], "how many runs there were is not told"
    assert means == [5] and facts["tuning"]["mean_runs"] == 5, "what is stated is what the number was drawn with"
    assert facts["epsilon"] == repeated_epsilon(plan_tuning(config, {"dim": [8]}, 5, 80).events, 5, facts["delta"])
    result = verify(tmp_path / "run")
    assert result.passed, [finding for finding in result.findings if finding.ok is False]
    for name, value in (
        ("epsilon", 4.0),
        ("delta", 0.5),
        ("mean_runs", 1.01),
        ("law", "fixed"),
        ("scored_on", "test items"),
        ("candidates", [{"learning_rate": 9.0}]),
        ("events", [*facts["tuning"]["events"][:-1], {**facts["tuning"]["events"][-1], "noise_multiplier": 1e6}]),
    ):
        changed = {**facts, "tuning": {**facts["tuning"], name: value}}
        (tmp_path / "run" / "privacy.json").write_text(json.dumps(changed))
        assert not verify(tmp_path / "run").passed, name
    # Forged throughout, headline and words included: the ε of the search is recomputed, not trusted.
    one_run = {**facts, "epsilon": facts["epsilon_one_run"], "words": facts["words"][:-1]}
    forged = tuning.restated(one_run, {**facts["tuning"], "epsilon": 4.0})
    (tmp_path / "run" / "privacy.json").write_text(json.dumps(forged))
    assert {f.name: f.ok for f in verify(tmp_path / "run").findings}["statement"] is False
    forged = {**facts, "epsilon": 4.0}
    (tmp_path / "run" / "privacy.json").write_text(json.dumps(forged))
    assert not verify(tmp_path / "run").passed


def test_the_real_trial_trains_and_scores_with_noise(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On validation items: the test items are for evaluating the winner."""
    force_runs(monkeypatch, 1)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(pems.Encoding.PEM, pems.PrivateFormat.PKCS8, pems.NoEncryption())
    public = key.public_key().public_bytes(pems.Encoding.PEM, pems.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "public.pem").write_bytes(public)
    asked: list[Any] = []
    release = release_metrics

    def watched(ranks: Any, *given: Any, **named: Any) -> Any:
        asked.append((ranks, given, named))
        return release(ranks, *given, **named)

    monkeypatch.setattr("dpformer.queries.metrics.release_metrics", watched)
    tune(config, {"dropout": [0.0, 0.1]}, tmp_path / "run", mean_runs=2, key=tmp_path / "key.pem")
    signed = verify(tmp_path / "run", key=tmp_path / "public.pem")
    assert signed.passed and {f.name: f.ok for f in signed.findings}["signature"] is True, "of the whole search"
    ((ranks, given, named),) = asked
    assert (given, named) == ((tuning.SCORE_NOISE,), {"filter_seen": True, "label": "score"}), (
        "with noise, and without a seed"
    )
    model = load_release(tmp_path / "run" / "model.safetensors").model
    dataset = load_dataset(config.replace(validation=True))
    assert np.array_equal(ranks, served_ranks(model, dataset, "validation").ranks)
    assert not np.array_equal(ranks, served_ranks(model, dataset, "test").ranks)


def test_candidates_are_drawn_at_random_and_independently(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is for repetitions that are all alike: each draws its candidate anew, whatever came before."""
    candidates = tuple({"dim": dim} for dim in (8, 16, 24, 32))
    search = tuning.Tuning(candidates, 2.0, (), 1e-3, 1.0)
    force_runs(monkeypatch, 900)
    drawn: list[int] = []

    def trial(candidate: Config, folder: Path) -> float:
        drawn.append(candidate.dim // 8 - 1)
        return 0.0

    tuning._search(config, search, tmp_path, SecureRandom("tuning", seed=0), trial)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_a_failure_leaves_nothing(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_runs(monkeypatch, 2)

    def trial(candidate: Config, folder: Path) -> float:
        folder.mkdir()
        raise MemoryError

    with pytest.raises(MemoryError):
        tune(config, {"dim": [8, 16]}, tmp_path / "run", trial=trial)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_ledger_counts_the_whole_search(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained; refused beyond the budget; stated, and what cannot be is found."""
    force_runs(monkeypatch, 1)
    path, out = tmp_path / "budget.json", tmp_path / "run"
    ledger_file.create(path, 8, 1e-3)
    ledger_file.reserve(path, tmp_path / "earlier", [earlier := Gaussian(5.0, label="counts")])

    def trial(candidate: Config, folder: Path) -> float:
        assert len(ledger_file.read(path).runs) == 2, "written down first"
        train(candidate, folder)
        return 0.0

    config = config.replace(delta=1e-3)
    facts = tune(config, {"dim": [8]}, out, mean_runs=3, trial=trial, ledger=path)
    budget, events = ledger_file.read(path), plan_tuning(config, {"dim": [8]}, 3, 80).events
    assert budget.runs[1]["mean_runs"] == 3 and budget.runs[1]["run"] == str(out)
    accountant = rdp.RdpAccountant().compose(dp_event.GaussianDpEvent(earlier.noise_multiplier))
    once = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(e.once(), e.compositions) for e in events])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(once, 3, 0.0))
    assert budget.spent == pytest.approx(accountant.get_epsilon(1e-3)) and budget.spent > facts["epsilon"] > 4
    assert facts["budget"] == budget.facts() and facts["budget"]["runs"] == 2
    assert "by 2 runs" in facts["nist_sp_800_226"]["remaining_budget"]
    assert verify(out).passed
    statement = facts["budget"] | {"spent": (4 + facts["epsilon"]) / 2}  # one run would fit, the search does not
    (out / "privacy.json").write_text(json.dumps({**facts, "budget": statement}))
    assert {f.name: f.ok for f in verify(out).findings}["budget of many runs"] is False
    with pytest.raises(DpformerError, match="nothing was released"):
        tune(config, {"dim": [8]}, tmp_path / "again", mean_runs=3, trial=trial, ledger=path)
    assert ledger_file.read(path) == budget and not (tmp_path / "again").exists()


def test_a_search_that_fails_stays_in_the_ledger(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless nothing was trained, since its folder could not be made."""
    force_runs(monkeypatch, 1)
    path = tmp_path / "budget.json"
    ledger_file.create(path, 12, 1e-3)
    (tmp_path / "file").write_text("")

    def trial(candidate: Config, folder: Path) -> float:
        raise DpformerError("training has diverged")

    search: Any = {"mean_runs": 3, "trial": trial, "ledger": path}
    with pytest.raises(DpformerError, match="cannot be created"):
        tune(config.replace(delta=1e-3), {"dim": [8]}, tmp_path / "file" / "run", **search)
    assert ledger_file.read(path).runs == ()
    with pytest.raises(DpformerError, match="diverged"):
        tune(config.replace(delta=1e-3), {"dim": [8]}, tmp_path / "run", **search)
    assert len(ledger_file.read(path).runs) == 1 and "counts this search as spent" in capsys.readouterr().err


def test_without_a_ledger_runs_on_the_same_data_are_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    force_runs(monkeypatch, 1)
    train(config, tmp_path / "earlier")
    tune(config, {"dim": [8]}, tmp_path / "run", mean_runs=3, trial=lambda each, out: float(bool(train(each, out))))
    assert f"note: {tmp_path / 'earlier'} used the same data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "choices", "mean_runs", "message"),
    [
        ({"epsilon": math.inf}, {"dim": [8]}, 10, "epsilon is inf"),
        ({"seed": 1}, {"dim": [8]}, 10, "tuning with a seed is not private"),
        ({"evaluate_every": 1}, {"dim": [8]}, 10, "evaluate_every shows exact metrics of every run"),
        ({}, {"dim": [8]}, 1.0, "mean_runs is 1; it must be above 1"),
        ({}, {"dim": [8]}, math.inf, "mean_runs is inf"),
        ({}, {}, 10, "there is nothing to try"),
        ({}, {"dim": []}, 10, "there is nothing to try"),
        ({}, {"epsilon": [1, 9]}, 10, "epsilon cannot be tuned"),
        ({}, {"batch_size": [10, 20]}, 10, "batch_size cannot be tuned"),
        ({}, {"seed": [1, 2]}, 10, "seed cannot be tuned"),
        ({}, {"dim": [8, -1]}, 10, "dim is -1"),
    ],
)
def test_what_would_be_dishonest_is_refused(
    config: Config, changes: dict[str, Any], choices: dict[str, list[Any]], mean_runs: float, message: str
) -> None:
    with pytest.raises(DpformerError, match=message):
        plan_tuning(config.replace(**changes), choices, mean_runs, 80)


def test_every_tunable_setting_leaves_the_cost_as_it_is(config: Config) -> None:
    from dpformer.kinds.planning import other_events

    resolved = config.resolve(users=80, threads=1)
    other = {"heads": 2, "norm": "pre", "shared": False, "clipping": "clip", "dropout": 0.1}
    other |= {"reattention_variant": "literal", "warmup": 0.1}
    for name in tuning.TUNABLE:
        changed = resolved.replace(**{name: other.get(name, getattr(resolved, name) * 2)})
        assert changed != resolved and other_events(changed) == other_events(resolved), name
        assert (changed.epsilon, changed.delta, changed.epochs, changed.batch_size) == (
            resolved.epsilon,
            resolved.delta,
            resolved.epochs,
            resolved.batch_size,
        )


def test_the_command(tmp_path: Path) -> None:
    run = ["tune", "--epsilon", "5", "--try", "learning-rate=1e-3,3e-3", "--dry-run"]
    result = CliRunner().invoke(app, [*run, "--users", "6040", "--epochs", "1", "--mean-runs", "3", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["candidates"] == [{"learning_rate": 1e-3}, {"learning_rate": 3e-3}] and facts["epsilon"] > 5
    for arguments, message in ((run, "give --users"), (["tune", "--try", "dim"], "it must be NAME=A,B")):
        error = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, DpformerError) and message in str(error)
