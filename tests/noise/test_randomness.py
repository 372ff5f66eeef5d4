"""Secure numbers: what they are a function of, their distribution, and that none is used twice."""

import json
import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from dpformer.noise import SecureNoise, SecureRandom
from dpformer.noise.gaussian import GROUP, HALF, normal_of_words
from dpformer.noise.noisy_sums import Numbers, release_sum
from dpformer.noise.randomness import CHUNK, public_grid

KEY = bytes(range(32))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In deviations from zero, for independent series."""
    return float(np.corrcoef(a, b)[0, 1] * math.sqrt(len(a)))


def test_words_are_chacha20_at_the_address() -> None:
    """An independent twin: the cipher at a counter written out, under HMAC-SHA256(key, context)."""
    import hashlib
    import hmac

    key = hmac.new(KEY, b"here", hashlib.sha256).digest()
    counter = (10).to_bytes(4, "little") + (7).to_bytes(6, "little") + (5).to_bytes(6, "little")
    cipher = Cipher(algorithms.ChaCha20(key, counter), mode=None).encryptor()
    wanted = np.frombuffer(cipher.update(bytes(256)), dtype="<u8")
    random = SecureRandom("here", key=KEY)
    np.testing.assert_array_equal(random.words(32, step=5, stream=7, start=80), wanted)
    np.testing.assert_array_equal(random.words(20, step=5, stream=7, start=83), wanted[3:23])


def naive_normal(words: np.ndarray) -> np.ndarray:
    """Box and Muller, one number at a time."""
    numbers = []
    for group in words.view(np.int64).reshape(-1, 2, HALF).tolist():
        radius = [math.sqrt(-2 * math.log((abs(word) + 0.5) / 2**63)) for word in group[0]]
        angle = [2 * math.pi * (word / 2**64) for word in group[1]]
        numbers += [r * math.cos(a) for r, a in zip(radius, angle, strict=True)]
        numbers += [r * math.sin(a) for r, a in zip(radius, angle, strict=True)]
    return np.array(numbers)


def test_normal_is_box_muller_of_the_words() -> None:
    random, count = SecureRandom(key=KEY), CHUNK + 3 * GROUP
    wanted = naive_normal(random.words(count, step=3, stream=1))
    np.testing.assert_allclose(random.normal(count, step=3, stream=1), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("start", [0, 1, GROUP, GROUP + 7, CHUNK - 1, 3 * CHUNK])
@pytest.mark.parametrize("count", [0, 1, 2, 7, GROUP - 1, GROUP, GROUP + 1, CHUNK + 1])
def test_any_range_of_an_address(count: int, start: int, threads: int) -> None:
    random, before = SecureRandom(key=KEY), torch.get_num_threads()
    whole = random.normal(5 * CHUNK, step=1)
    torch.set_num_threads(threads)
    try:
        np.testing.assert_array_equal(random.normal(count, step=1, start=start), whole[start : start + count])
        np.testing.assert_array_equal(random.normal(5 * CHUNK, step=1), whole)
    finally:
        torch.set_num_threads(before)


def test_extreme_words_give_finite_numbers() -> None:
    ends = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    words = torch.zeros(GROUP, dtype=torch.int64)
    words[:25], words[HALF : HALF + 25] = ends.repeat_interleave(5), ends.repeat(5)
    numbers = normal_of_words(words)
    assert bool(numbers.isfinite().all())
    assert float(numbers.abs().max()) == pytest.approx(math.sqrt(2 * 64 * math.log(2)))  # the tail reaches 9.4


def test_normal_distribution() -> None:
    numbers = SecureRandom(seed=1).normal(1_000_000, step=0)
    assert numbers.mean() == pytest.approx(0, abs=5e-3)
    assert numbers.std() == pytest.approx(1, abs=5e-3)  # noise × 0.9 or reused at half: caught
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    assert stats.anderson(numbers[:200_000], "norm", method="interpolate").pvalue >= 0.01
    assert stats.kurtosis(numbers) == pytest.approx(0, abs=0.03)
    for far in (3, 4, 4.5):
        for beyond in ((numbers > far).sum(), (numbers < -far).sum()):
            assert stats.binomtest(int(beyond), len(numbers), stats.norm.sf(far)).pvalue > 1e-3


def test_far_tail() -> None:
    """Radii of words that are small by 2⁻²⁰ and more: beyond 5.3 the tail is that of a Gaussian too."""
    words = torch.from_numpy(SecureRandom(seed=4).words(400 * GROUP, step=0).view(np.int64).copy())
    words.view(-1, 2, HALF)[:, 0] >>= 20
    numbers = normal_of_words(words).view(-1, 2, HALF)
    squares = (numbers[:, 0].square() + numbers[:, 1].square()).flatten() / 2 - 20 * math.log(2)
    assert stats.kstest(squares.numpy(), "expon").pvalue > 1e-3


def test_no_correlation_along_coordinates_steps_streams_or_contexts() -> None:
    random, n = SecureRandom(seed=2), 200_000
    here = random.normal(n, step=4, stream=3)
    for lag in (1, 2, HALF, GROUP, CHUNK):  # half a group apart are the two numbers of one pair
        assert abs(correlation(here[:-lag], here[lag:])) < 4
    others = {
        "step": random.normal(n, step=5, stream=3),
        "stream": random.normal(n, step=4, stream=4),
        "swapped": random.normal(n, step=3, stream=4),
        "context": random.within("x").normal(n, step=4, stream=3),
        "key": SecureRandom(seed=3).normal(n, step=4, stream=3),
    }
    for name, other in others.items():
        assert abs(correlation(here, other)) < 4, name
        assert not np.isin(here[:1000], other).any(), name  # not even shifted


def test_steps_do_not_overlap_however_long() -> None:
    """2³² blocks lie between streams: the last words of one are far from the first of the next."""
    random = SecureRandom(key=KEY)
    tail = random.words(4, step=0, stream=0, start=2**35 - 8)
    assert not np.isin(tail, random.words(100_000, step=0, stream=1)).any()
    for step, stream in ((2**48, 0), (0, 2**48), (-1, 0), (0, -1)):
        with pytest.raises(ValueError):
            random.words(1, step=step, stream=stream)
    with pytest.raises(ValueError, match="beyond the counter"):
        random.words(1, step=0, start=2**35)
    with pytest.raises(ValueError):
        random.normal(GROUP + 1, step=0, start=2**35 - GROUP)


def test_contexts_cannot_be_confused() -> None:
    root = SecureRandom("a", key=KEY)
    contexts = [root, root.within("b"), root.within("b").within("c"), root.within("b/c"), SecureRandom("a/b", key=KEY)]
    draws = [tuple(random.words(2, step=0)) for random in contexts]
    assert len(set(draws)) == len(draws)


def test_every_instance_has_its_own_key() -> None:
    draws = {tuple(SecureRandom().words(2, step=0)) for _ in range(20)}
    assert len(draws) == 20
    assert not np.array_equal(SecureNoise().normal(10), SecureNoise().normal(10))


def test_keys_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: KEY[:size])
    np.testing.assert_array_equal(SecureRandom("x").words(4, step=0), SecureRandom("x", key=KEY).words(4, step=0))


def test_state_restores_the_numbers_and_the_mark() -> None:
    for random in (SecureRandom("c"), SecureRandom("c", seed=1)):
        again = SecureRandom("c").with_state(json.loads(json.dumps(random.state_dict())))
        np.testing.assert_array_equal(again.normal(10, step=3), random.normal(10, step=3))
        assert again.private == random.private
        other = SecureRandom("other data").with_state(random.state_dict())
        assert not np.isin(other.normal(10, step=3), random.normal(10, step=3)).any()
    with pytest.raises(ValueError, match="extra"):
        SecureRandom().with_state({"key": KEY.hex(), "private": True, "extra": 1})


def test_seeds_are_marked() -> None:
    seeded = SecureRandom(seed=0)
    assert not seeded.private and not seeded.within("x").private and "NOT private" in seeded.description
    assert SecureRandom().private and SecureRandom().within("x").private and "NOT" not in SecureRandom().description
    assert not SecureNoise(seed=1).private and SecureNoise().private
    np.testing.assert_array_equal(SecureRandom(seed=0).words(3, step=1), seeded.words(3, step=1))


def test_bad_keys_are_refused() -> None:
    for options in ({"key": b"short"}, {"key": KEY, "seed": 1}, {"seed": -1}, {"seed": 1.5}):
        with pytest.raises(ValueError):
            SecureRandom(**options)  # type: ignore[arg-type]


def test_one_release_never_repeats() -> None:
    noise = SecureNoise(seed=5)
    assert abs(correlation(noise.normal(100_000), noise.normal(100_000))) < 4


@pytest.mark.parametrize("deviation", [1e-8, 0.5, 1.0, 3.3, 1e5])
def test_public_grid(deviation: float) -> None:
    grid = public_grid(deviation)
    assert math.frexp(grid)[0] == 0.5  # a power of two
    assert deviation / 2**11 < grid <= deviation / 2**10


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_is_released_on_the_grid(dtype: torch.dtype, ready: bool) -> None:
    """Against a naive twin: sum and noise as fractions, rounded to the grid, then divided."""
    from fractions import Fraction

    count, deviation = 3_000, 1.7
    numbers = Numbers(SecureRandom(key=KEY), 4, 2, count, start=700)
    noise = numbers.all()
    sums = (torch.arange(count) / 37).sin().to(dtype)
    grid = Fraction(public_grid(deviation))
    wanted = [
        float(round((Fraction(x) + Fraction(deviation) * Fraction(z)) / grid) * grid)
        for x, z in zip(sums.tolist(), noise.tolist(), strict=True)
    ]
    release_sum(sums, Numbers(numbers.random, 4, 2, count, 700, noise if ready else None), deviation, 3.0)
    torch.testing.assert_close(sums, (torch.tensor(wanted, dtype=torch.float64) / 3).to(dtype), rtol=0, atol=0)


def test_no_piece_of_a_large_sum_gets_the_noise_of_another() -> None:
    from dpformer.noise.noisy_sums import PIECE

    sums = torch.zeros((1 << 21) + 5 * PIECE + 3)
    release_sum(sums, Numbers(SecureRandom(seed=7), 0, 0, len(sums)), 1.0, 1.0)
    assert float(sums.std()) == pytest.approx(1, abs=3e-3)
    here = sums[:PIECE].numpy()
    for apart in (*range(PIECE, len(sums) - PIECE, PIECE), 1 << 20, 1 << 21):
        other = sums[apart : apart + PIECE].numpy()
        assert abs(correlation(here[: len(other)], other)) < 4.5, apart


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_the_released_sum(threads: int) -> None:
    before, sums = torch.get_num_threads(), torch.zeros(200_003)
    numbers = Numbers(SecureRandom(seed=7), 0, 0, len(sums))
    torch.set_num_threads(threads)
    try:
        release_sum(sums, numbers, 1.0, 1.0)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(sums.double(), (numbers.all() * 2**10).round() / 2**10, rtol=0, atol=0)
