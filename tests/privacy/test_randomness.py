"""Secure numbers: what they are a function of, their distribution, and that none is used twice."""

import json
import math
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dpformer.privacy import NoiseAhead, SecureNoise, SecureRandom
from dpformer.privacy.randomness import CHUNK, public_grid

KEY = bytes(range(32))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In deviations from zero, for independent series."""
    return float(np.corrcoef(a, b)[0, 1] * math.sqrt(len(a)))


def test_words_are_aes_in_counter_mode_at_the_address() -> None:
    """An independent twin: ECB on counters written out, under HMAC-SHA256(key, context)."""
    import hashlib
    import hmac

    key = hmac.new(KEY, b"here", hashlib.sha256).digest()
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    blocks = b"".join((5 << 80 | 7 << 48 | block).to_bytes(16, "big") for block in range(10, 14))
    wanted = np.frombuffer(encrypt.update(blocks), dtype="<u8")
    np.testing.assert_array_equal(SecureRandom("here", key=KEY).words(8, step=5, stream=7, start=20), wanted)


def naive_normal(words: np.ndarray) -> np.ndarray:
    """Box and Muller, one number at a time."""
    half = len(words) // 2
    radius = [math.sqrt(-2 * math.log((int(word) + 1) / 2**64)) for word in words[:half]]
    angle = [2 * math.pi * (int(word) / 2**64) for word in words[half:]]
    pairs = list(zip(radius, angle, strict=True))
    return np.array([r * math.cos(a) for r, a in pairs] + [r * math.sin(a) for r, a in pairs])


def test_normal_is_box_muller_of_the_words() -> None:
    random = SecureRandom(key=KEY)
    words = random.words(2 * CHUNK, step=3, stream=1)
    wanted = np.concatenate([naive_normal(words[:CHUNK]), naive_normal(words[CHUNK:])])
    np.testing.assert_allclose(random.normal(2 * CHUNK, step=3, stream=1), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_shorter_draw_is_a_prefix(count: int) -> None:
    random = SecureRandom(key=KEY)
    np.testing.assert_array_equal(random.normal(count, step=1), random.normal(2 * CHUNK, step=1)[:count])


def test_extreme_words_give_finite_numbers() -> None:
    from dpformer.privacy.randomness import _box_muller

    ends = np.array([0, 1, 2**64 - 1, 2**63], dtype=np.uint64)
    words = np.concatenate([np.repeat(ends, 4), np.tile(ends, 4)])
    numbers = _box_muller(words)
    assert np.isfinite(numbers).all()
    assert np.abs(numbers).max() == pytest.approx(math.sqrt(2 * 64 * math.log(2)))  # the tail reaches 9.4


def test_normal_distribution() -> None:
    numbers = SecureRandom(seed=1).normal(1_000_000, step=0)
    assert numbers.mean() == pytest.approx(0, abs=5e-3)
    assert numbers.std() == pytest.approx(1, abs=5e-3)  # noise × 0.9 or reused at half: caught
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    assert stats.kurtosis(numbers) == pytest.approx(0, abs=0.03)
    beyond = (np.abs(numbers) > 4).sum()
    assert stats.binomtest(int(beyond), len(numbers), 2 * stats.norm.sf(4)).pvalue > 1e-3


def test_no_correlation_along_coordinates_steps_streams_or_contexts() -> None:
    random, n = SecureRandom(seed=2), 200_000
    here = random.normal(n, step=4, stream=3)
    for lag in (1, 2, CHUNK // 2, CHUNK):  # half a chunk apart are the two numbers of one pair
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
    """2⁴⁸ blocks lie between streams: the last words of one are far from the first of the next."""
    random = SecureRandom(key=KEY)
    tail = random.words(4, step=0, stream=0, start=2**40)
    assert not np.isin(tail, random.words(100_000, step=0, stream=1)).any()
    for step, stream in ((2**48, 0), (0, 2**32), (-1, 0), (0, -1)):
        with pytest.raises(ValueError):
            random.words(1, step=step, stream=stream)


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


def test_noise_made_ahead_is_the_noise_of_the_address() -> None:
    random, sizes = SecureRandom(key=KEY), [5, 0, 40_000]
    wanted = [random.normal(size, step=9, stream=stream) for stream, size in enumerate(sizes)]
    ahead = NoiseAhead()
    for step, given in ((9, sizes), (8, sizes), (9, [5, 0]), (None, sizes)):  # prepared, other step, other sizes, not
        if step is not None:
            ahead.prepare(random, step, given)
        for got, want in zip(ahead.take(random, 9, sizes), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    ahead.prepare(random.within("other weights"), 9, sizes)
    np.testing.assert_array_equal(list(ahead.take(random, 9, sizes))[2], wanted[2])


def test_noise_for_large_tables_is_not_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpformer.privacy.noise.AHEAD", 100)
    random, sizes, ahead = SecureRandom(key=KEY), [60, 1000, 41, 40], NoiseAhead()
    ahead.prepare(random, 1, sizes)
    assert ahead._worker is not None
    ahead._worker.join()
    assert set(ahead._worker.arrays) == {0, 3}, "those that fit"
    for stream, got in enumerate(ahead.take(random, 1, sizes)):
        np.testing.assert_array_equal(got, random.normal(sizes[stream], step=1, stream=stream))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_noise_ahead_survives_a_fork() -> None:
    """The thread does not live on in the child, which makes the noise itself instead of waiting for ever."""
    random, sizes, ahead = SecureRandom(key=KEY), [2_000_000], NoiseAhead()
    ahead.prepare(random, 1, sizes)
    child = os.fork()
    if child == 0:
        good = np.array_equal(next(ahead.take(random, 1, sizes)), random.normal(sizes[0], step=1))
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(next(ahead.take(random, 1, sizes)), random.normal(sizes[0], step=1))
