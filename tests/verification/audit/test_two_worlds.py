"""n users and n − 1: what is divided by is a constant, so the two worlds differ by one summand and nothing else.

arXiv 2605.15648 (2026) says that dividing the noisy sum by the *expected* batch can give away more than the sum. It can
where "expected" is q times the number of users that are there: then scale and noise of all coordinates tell the worlds
apart, whatever the missing user did. Here N and B are public and fixed before the data is read.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpformer as dp
from dpformer.accounting import PoissonGaussian
from dpformer.runs import train
from dpformer.verification.audit.bound import Guesses, clopper_pearson
from dpformer.verification.audit.checks import Check, told_apart
from tests.training.conftest import tiny_config
from tests.training.memo import accountant_remembers  # noqa: F401

N, Q, STEPS, SIGMA, SPARE, RUNS = 12, 0.5, 4, 2.0, 2000, 60
EVENT = PoissonGaussian(SIGMA, Q, STEPS)


def released(present: int, divisor: float) -> np.ndarray:
    """(T, d) what a run hands to the inner optimizer: user 0 is loud in one coordinate, all others in another one."""
    data = torch.zeros(N, 2 + SPARE)
    data[1:, 1] = 5.0
    if present == N:
        data[0, 0] = 5.0  # the user in question; else nothing is in that place
    model = nn.Linear(2 + SPARE, 1, bias=False)
    clipping = dp.PhantomClipping(model)
    optimizer = dp.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=SIGMA, clip_norm=1.0, expected_batch_size=divisor
    )
    seen = []
    for batch in dp.PoissonBatches(N, Q, STEPS):
        if len(batch):
            with clipping.users(data[batch.users], batch[:]) as user:
                loss = model(user).sum(1)
            clipping.backward(loss, dp.clip(1.0))
        optimizer.step(batch)
        seen.append(model.weight.grad.flatten().clone())  # type: ignore[union-attr]
        optimizer.zero_grad()
    assert optimizer.event() == PoissonGaussian(SIGMA, Q, STEPS, label="training")
    return torch.stack(seen).numpy()


def larger_world(seen: np.ndarray, statistic: str) -> float:
    """Above 0 where an attacker, who knows all of the code, says that n users were there."""
    noise = SIGMA / (Q * N)  # deviation of a mean over B = q·n
    if statistic == "noise":  # over q·(n − 1) it is larger everywhere
        smaller = SIGMA / (Q * (N - 1))
        return (noise + smaller) / 2 - float(seen[:, 2:].std())
    if statistic == "others":  # over q·(n − 1) their mean is 1, else (n − 1)/n
        return 1 - 0.5 / N - float(seen[:, 1].mean())
    return float(np.logaddexp(np.log1p(-Q), np.log(Q) + (2 * seen[:, 0] / noise * SIGMA - 1) / (2 * SIGMA**2)).sum())


def audited(own_divisor: bool, statistic: str) -> Check:
    """RUNS runs in each world; `own_divisor`: each divides by q times its own number of users, as others do."""
    worlds = {
        present: [
            larger_world(released(present, Q * (present if own_divisor else N)), statistic) > 0 for _ in range(RUNS)
        ]
        for present in (N, N - 1)
    }
    missed, false = worlds[N].count(False), worlds[N - 1].count(True)
    error = clopper_pearson(missed + false, 2 * RUNS, 0.05)
    return told_apart(Guesses(false, RUNS, missed, RUNS, error), [EVENT])


@pytest.mark.parametrize("statistic", ["noise", "others", "the user"])
def test_no_statistic_tells_more_than_the_ledger_says(statistic: str) -> None:
    assert audited(False, statistic).passed


def test_dividing_by_the_number_that_is_there_is_accused() -> None:
    """The noise of every coordinate says how many users there were; the user's own coordinate is not looked at."""
    assert not audited(True, "noise").passed


def test_both_worlds_publish_the_same_numbers(tmp_path: Path) -> None:
    """With --users nothing public, B, q, T, σ, δ among it, depends on whether a user is in the log."""
    facts = []
    for present in (40, 39):
        log = tmp_path / f"{present}.csv"
        rows = [f"u{user},i{(user + step) % 9},{step}" for user in range(present) for step in range(4)]
        log.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
        run = train(tiny_config(log, users=40, epochs=1, seed=None), tmp_path / f"run-{present}").folder
        facts.append(json.loads((run / "privacy.json").read_text()))
    varying = {"hashes", "key_commitment"}
    assert {name: facts[0][name] for name in facts[0].keys() - varying} == {
        name: facts[1][name] for name in facts[1].keys() - varying
    }
    assert facts[0]["expected_batch_size"] == 20 and facts[0]["sample_rate"] == 0.5
