"""Audits of whole settings: correct builds at several budgets, and faults put in on purpose at the paper's settings.

    python -m benchmarks.audits --canaries 10000 --seed 0 [--only NAME …]

One JSON line an audit: the ε claimed, the ε shown with 95% confidence, which checks accuse, and the time.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dpformer.accounting import calibrate
from dpformer.clipping import PhantomClipping, engine, normalize, parameter_norms
from dpformer.noise.noisy_sums import Numbers
from dpformer.queries.transitions import rounds as counts_release
from dpformer.queries.transitions.query import TRANSITIONS
from dpformer.sampling import PoissonBatches
from dpformer.training import plan
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.verification.audit import Audit, audit, audit_query

LEAST_SHOWN = 0.85  # of the claimed ε, on a correct build with 10⁴ canaries
USERS = 6040  # MovieLens-1M; 100 epochs, δ = 1 / users
_noise = PrivateOptimizer._noise


def scaled(factor: Callable[[Tensor], Tensor]) -> list[object]:
    def wrong(self: PrivateOptimizer, parameters: list[Tensor]) -> list[Numbers | None]:
        return [made and replace(made, ready=factor(made.all())) for made in _noise(self, parameters)]

    return [patch.object(PrivateOptimizer, "_noise", wrong)]


def rate(factor: float) -> list[object]:
    return [
        patch.object(plan, "PoissonBatches", lambda n, q, steps, **named: PoissonBatches(n, factor * q, steps, **named))
    ]


def clipping_off() -> list[object]:
    return [
        patch.object(normalize, "__call__", lambda self, norms: torch.ones_like(norms)),
        patch.object(
            PhantomClipping,
            "_factors",
            staticmethod(lambda finite, norms, upper, clip: (clip(norms), bool(finite.all()))),
        ),
    ]


def no_cross_term() -> list[object]:
    return [
        patch.object(parameter_norms, "inner", lambda one, other: torch.zeros(())),
        patch.object(engine, "compare_with_autograd", lambda *_: True),
    ]


def of_ranks(made: Tensor) -> Tensor:
    return torch.stack([torch.randn(made.shape, dtype=made.dtype) / 4 for _ in range(4)]).sum(0)


def quiet_counts() -> list[object]:
    deviation = counts_release.deviation_of
    return [patch.object(counts_release, "deviation_of", lambda this, noise: 0.7 * deviation(this, noise))]


# name → (ε, expected batch size or 0 for counts, what is broken)
AUDITS: dict[str, tuple[float, int, Callable[[], list[object]]]] = {
    "correct, ε 5": (5.0, 1024, list),
    "noise × 0.7": (5.0, 1024, lambda: scaled(lambda made: 0.7 * made)),
    "q × 2": (5.0, 1024, lambda: rate(2.0)),
    "norms without the tied cross term": (5.0, 1024, no_cross_term),
    "clipping off": (5.0, 1024, clipping_off),
    "noise of each of 4 ranks divided by 4": (5.0, 1024, lambda: scaled(of_ranks)),
    "correct, ε 8": (8.0, 1024, list),
    "correct, ε 10": (10.0, 1024, list),
    "noise × 0.9": (5.0, 1024, lambda: scaled(lambda made: 0.9 * made)),
    "correct, ε 5, batches of 256": (5.0, 256, list),
    "correct, counts, ε 5": (5.0, 0, list),
    "correct, counts, ε 8": (8.0, 0, list),
    "correct, counts, ε 10": (10.0, 0, list),
    "counts, noise × 0.7": (5.0, 0, quiet_counts),
}


def run(epsilon: float, batch: int, canaries: int, seed: int) -> Audit:
    """Batches of no users: transition counts, which are one release."""
    q, steps = (batch / USERS, -(-100 * USERS // batch)) if batch else (1.0, 1)
    sigma = calibrate(epsilon=epsilon, delta=1 / USERS, sample_rate=q, steps=steps)
    if not batch:
        return audit_query(TRANSITIONS, noise_multiplier=sigma, delta=1 / USERS, canaries=canaries, seed=seed)
    return audit(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=1 / USERS, canaries=canaries, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(AUDITS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = 0
    for name in arguments.only:
        epsilon, batch, broken = AUDITS[name]
        with ExitStack() as stack:
            for change in broken():
                stack.enter_context(change)  # type: ignore[arg-type]
            result = run(epsilon, batch, arguments.canaries, arguments.seed)
        facts = result.to_dict()
        accused = [check["name"] for check in facts["checks"] if not check["passed"]]
        share = facts["epsilon_lower"] / facts["epsilon_claimed"]
        missed += bool(accused) or share < LEAST_SHOWN if name.startswith("correct") else not accused
        shown = {key: round(facts[key], 3) for key in ("epsilon_claimed", "epsilon_lower", "epsilon_lower_any")}
        print(
            json.dumps(
                {"audit": name, **shown, "accused by": accused, "seconds": facts["seconds"]}, ensure_ascii=False
            ),
            flush=True,
        )
    raise SystemExit(f"{missed} audits were not as they should be" if missed else 0)


if __name__ == "__main__":
    main()
