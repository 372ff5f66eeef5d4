"""The noise kernel in Triton, run by its interpreter: the words of the cipher, and the numbers of the CPU."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dpformer.noise import SecureRandom
from dpformer.noise.device_sums import release_on_device
from dpformer.noise.gaussian import GROUP
from dpformer.noise.noisy_sums import Numbers, Piece, Release, in_turn, release_sums
from tests.distributed import jobs

pytest.importorskip("triton")
COUNTS = [1, GROUP - 1, 0, 3 * GROUP, 700, 5]


def interpreted(target: Callable[[], None]) -> None:
    """In a process of its own: Triton is told to interpret before the kernel is imported."""
    assert jobs.finish(jobs.start(1, _interpreted, target)) == [0]


def _interpreted(target: Callable[[], None]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    target()


def on_kernel(pairs: list[tuple[torch.Tensor, Numbers]], deviation: float, divisor: float) -> None:
    """`release_sums` by the kernel, of sums of one dtype on the CPU."""
    from dpformer.kernels.on_device import add_noise_on

    assert add_noise_on(pairs[0][0].device) is not None
    release = Release(deviation, divisor)
    pieces = [Piece(sums, numbers, 0, numbers.count) for sums, numbers in pairs]
    release_on_device(pieces, release.scale, 1 / release.grid, release.divisor_of(pairs[0][0]))


def words() -> None:
    from tests.noise.words_kernel import words_on_kernel

    for seed, (step, stream, block) in enumerate([(0, 0, 0), (7, 2**48 - 1, 5), (2**48 - 1, 3, 2**32 - 40)]):
        random = SecureRandom(seed=seed)
        found = words_on_kernel(random.cipher_state(step, stream, block, 32), 32)
        wanted = random.words(32 * 8, step=step, stream=stream, start=8 * block)
        np.testing.assert_array_equal(found.numpy().view(np.uint64), wanted)


def test_words_are_those_of_the_cipher() -> None:
    interpreted(words)


def numbers() -> None:
    random, torch_random = SecureRandom(seed=5), torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        here = [(3 * torch.randn(count, generator=torch_random)).to(dtype) for count in COUNTS]
        there = [sums.clone() for sums in here]
        release_sums(zip(here, in_turn(random, 2, COUNTS), strict=True), 1.3, 7.0)
        on_kernel(list(zip(there, in_turn(random, 2, COUNTS), strict=True)), 1.3, 7.0)
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_numbers_are_those_of_the_cpu() -> None:
    """To the bit, for sums of every dtype and length, wherever in a group of numbers they start."""
    interpreted(numbers)


def rounding() -> None:
    random = SecureRandom(seed=6)
    grid = Release(1.0, 1.0).grid
    for power in (0, 20, 50, 51, 52, 53, 60):  # around 2^52 grid cells float64 stops having halves
        here = torch.tensor([2.0**power + 0.5, -(2.0**power) - 0.5, 2.0**power + 1.5], dtype=torch.float64) * grid
        there = here.clone()
        for release, sums in [(release_sums, here), (on_kernel, there)]:
            release([(sums, Numbers(random, 1, 0, 3, start=511))], 1.0, 1.0)
        torch.testing.assert_close(there, here, rtol=0, atol=0)
        assert not (there / grid % 1).any()


def test_every_number_is_on_the_grid() -> None:
    interpreted(rounding)


def apart() -> None:
    """A wrong start of the numbers would show."""
    random: Any = SecureRandom(seed=5)
    zeros = [torch.zeros(GROUP) for _ in range(2)]
    for start, sums in enumerate(zeros):
        on_kernel([(sums, Numbers(random, 2, 0, GROUP, start))], 1.0, 1.0)
    assert torch.equal(zeros[0][1:], zeros[1][:-1]) and not torch.equal(*zeros)
    assert 0.8 < float(zeros[0].std()) < 1.2


def test_numbers_follow_their_start() -> None:
    interpreted(apart)
