import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpformer.training.microbatches import by_length, cut
from dpformer.training.schedule import warmup_then_decay


@given(steps=st.integers(1, 500), warmup=st.floats(0, 0.99))
def test_the_rate_rises_then_falls_and_is_never_zero(steps: int, warmup: float) -> None:
    rates = [warmup_then_decay(step, steps, warmup) for step in range(steps)]
    top = int(np.argmax(rates))
    assert min(rates) > 0 and max(rates) <= 1
    assert (np.diff(rates[: top + 1]) >= 0).all() and (np.diff(rates[top:]) <= 0).all()


def test_the_paper_s_schedule() -> None:
    rates = [warmup_then_decay(step, 100) for step in range(100)]
    assert rates[0] == 1 / 20 and rates[19] == rates[20] == 1 and rates[60] == 0.5 and rates[99] == 1 / 80


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    tokens=st.integers(1, 200),
)
def test_every_user_is_in_one_micro_batch_and_the_limit_holds(lengths: list[int], tokens: int) -> None:
    every = np.array(lengths, dtype=np.int64)
    users = by_length(np.arange(len(every)), every)
    parts = [users[rows] for rows in cut(every[users], tokens)]
    assert sorted(np.concatenate(parts).tolist() if parts else []) == list(range(len(every)))
    assert (np.diff(every[users]) <= 0).all()
    for part in parts:
        assert len(part) == 1 or len(part) * every[part].max() <= tokens
