"""A kernel of one's own, all of it in this file: noise on a type of device, with the bits of the reference."""

import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dpformer.kernels import on_device
from dpformer.noise import SecureRandom
from dpformer.noise.chacha import BLOCK_WORDS, keystream
from dpformer.noise.device_sums import release_on_device
from dpformer.noise.gaussian import GROUP, normal_of_words
from dpformer.noise.noisy_sums import Piece, Release, in_turn, release_sums

COUNTS = [1, GROUP - 1, 3 * GROUP, 700, 5]
launches: list[int] = []


def add_noise(sums: Tensor, constants: Tensor, before: int) -> None:
    """sums (n,) <- round(scale z + per_grid sums) / divisor; the noise z starts `before` numbers after the first."""
    launches.append(len(sums))
    state, numbers = constants[:16].tolist(), constants[16:].tolist()
    scale, per_grid, divisor = struct.unpack("<3d", struct.pack("<3q", *numbers))
    counter = int.from_bytes(struct.pack("<4i", *state[12:]), "little")
    blocks = -(-(before + len(sums)) // GROUP) * (GROUP // BLOCK_WORDS)
    z = normal_of_words(keystream(struct.pack("<8i", *state[4:12]), counter, blocks, sums.device))
    sums.copy_((z[before : before + len(sums)] * scale + sums.double() * per_grid).round() / divisor)


@pytest.fixture
def registered() -> Iterator[None]:
    on_device.register("cpu", add_noise)  # the type of the tensors below
    launches.clear()
    yield
    del on_device._registered["cpu"]


def test_it_adds_the_noise_of_the_reference_in_one_launch(registered: None) -> None:
    random, torch_random = SecureRandom(seed=5), torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        here = [(3 * torch.randn(count, generator=torch_random)).to(dtype) for count in COUNTS]
        there = [sums.clone() for sums in here]
        release_sums(zip(here, in_turn(random, 2, COUNTS), strict=True), 1.3, 7.0)
        release = Release(1.3, 7.0)
        pairs = zip(there, in_turn(random, 2, COUNTS), strict=True)
        pieces = [Piece(sums, numbers, 0, numbers.count) for sums, numbers in pairs]
        release_on_device(pieces, release.scale, 1 / release.grid, release.divisor_of(there[0]))
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert launches == [sum(COUNTS)] * 3


def test_a_type_of_device_has_one_kernel(registered: None) -> None:
    with pytest.raises(ValueError, match="cpu has a kernel for noise already"):
        on_device.register("cpu", add_noise)
