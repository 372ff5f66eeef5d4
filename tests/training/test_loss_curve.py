"""The loss curve of a seeded run is that of the naive engine, one user at a time in plain autograd, up to rounding."""

from typing import Any

import numpy as np
import pytest

from dpformer.clipping import normalize, parameter_norms
from dpformer.clipping.bounded_sum import addends_of, put_bounded
from dpformer.models import softmax_head
from dpformer.sampling import Batch
from dpformer.training.optimizer import PrivateOptimizer
from tests.training.test_loop import loss_of, naive_sum, trainer_of


@pytest.fixture(autouse=True)
def _noise_of_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is addressed by the sum, so after one different bit all of it differs: here by the step alone."""
    monkeypatch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)


def curve(naive: bool, **choices: Any) -> list[float]:
    trainer = trainer_of(epochs=3, learning_rate=0.1, **choices)
    if naive:
        engine = trainer.add_gradients

        def one_at_a_time(batch: Batch) -> Any:
            total = naive_sum(trainer, batch.users.numpy(), normalize(1.0))
            parts = engine(batch)  # for the losses it reports, and who was added
            put_bounded(trainer.parameters, total, 1.0, addends_of(trainer.parameters))
            return parts

        trainer.add_gradients = one_at_a_time  # type: ignore[method-assign]
    return [loss_of(trainer.advance()) for _ in range(trainer.batches.steps)]


@pytest.mark.parametrize("budget", [1, 1 << 25], ids=["computed again", "kept"])
@pytest.mark.parametrize("choices", [{}, {"reattention": True}, {"shared": False}, {"model": "gru"}], ids=str)
def test_the_curve_is_that_of_the_naive_engine(
    choices: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_head, "KEEP", budget)
    monkeypatch.setattr(parameter_norms, "KEEP", budget)
    choices = {"model": "transformer", "reattention": False, **choices}
    if choices["model"] == "gru":
        choices["reattention"] = None
    ours, naive = curve(naive=False, **choices), curve(naive=True, **choices)
    assert len(ours) > 8 and max(ours) - min(ours) > 0.02, "something was learned, or lost"
    # Sums are rounded to a public grid before they are released: one rounding may fall the other way.
    np.testing.assert_allclose(ours, naive, rtol=2e-4)
