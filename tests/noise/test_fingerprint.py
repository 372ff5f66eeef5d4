"""The fingerprint of weights: against a naive twin, and that any change changes it."""

import hashlib

import pytest
import torch
from torch import Tensor

from dpformer.kernels import native
from dpformer.noise import SecureRandom
from dpformer.noise.fingerprint import HASHES, ROW, ROWS, Fingerprint, _in_numpy, _in_torch

RANDOM = SecureRandom("test", seed=5)
FINGERPRINT = Fingerprint(RANDOM)


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and its twin pass the same tests."""
    if request.param == "in Python":
        monkeypatch.setattr(native, "kernels", None)


def naive(tensors: list[Tensor]) -> str:
    """Row by row and word by word, in Python's integers."""
    keys = RANDOM.within("fingerprint").words(HASHES * ROW // 2, step=0).tobytes()
    digest = hashlib.sha256(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode())
    every = [tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    every = [data + bytes(-len(data) % 4) for data in every]
    together: dict[object, list[int]] = {}
    for place, data in enumerate(every):
        together.setdefault(place if len(data) > 4 * ROW * ROWS else "small", []).append(place)
    for places in together.values():
        digest.update(repr(places).encode())
        data = b"".join(every[place] for place in places)
        for at in range(0, len(data), 4 * ROW):
            row = data[at : at + 4 * ROW].ljust(4 * ROW, b"\0")
            for number in range(HASHES):
                total, key = 0, keys[4 * ROW * number :]
                for place in range(0, 4 * ROW, 8):
                    low, high = (
                        int.from_bytes(row[i : i + 4], "little") + int.from_bytes(key[i : i + 4], "little")
                        for i in (place, place + 4)
                    )
                    high %= 2**32
                    total += (low % 2**32) * (high - 2**32 if high >= 2**31 else high)
                digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 3, ROW, 2 * ROW + 5])
def test_against_a_naive_twin(count: int, dtype: torch.dtype) -> None:
    tensors = [torch.randn(count).to(dtype), torch.randn(2, 3).to(dtype).T, torch.randn(5)]
    assert FINGERPRINT(tensors) == naive(tensors)


@pytest.mark.parametrize("rows", [1, 31, 33, ROWS + 1])
def test_other_devices_compute_the_same(rows: int) -> None:
    words, keys = (torch.randint(-(2**31), 2**31, (n, 64), dtype=torch.int32) for n in (rows, HASHES))
    assert torch.equal(_in_torch(words, keys), _in_numpy(words.numpy(), keys.numpy()))


def test_a_large_tensor_between_small_ones_against_a_naive_twin() -> None:
    tensors = [torch.randn(3), torch.randn(ROW * ROWS + 9), torch.randn(2, 2)]
    assert FINGERPRINT(tensors) == naive(tensors)


def test_more_rows_than_are_hashed_at_a_time() -> None:
    tensor = torch.randn(ROW * ROWS + 9)
    whole = FINGERPRINT([tensor])
    tensor[-1] += 1
    assert FINGERPRINT([tensor]) != whole


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 5000, 8191])
@pytest.mark.parametrize("bit", [0, 1, 22, 30, 31])
def test_every_bit_counts(place: int, bit: int) -> None:
    tensor = torch.randn(8192)
    before = FINGERPRINT([tensor])
    tensor.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert FINGERPRINT([tensor]) != before


def test_shape_dtype_order_and_secret_count() -> None:
    tensor = torch.zeros(6)
    prints = {
        FINGERPRINT([tensor]),
        FINGERPRINT([tensor.view(2, 3)]),
        FINGERPRINT([tensor.double()]),
        FINGERPRINT([tensor, torch.ones(6)]),
        FINGERPRINT([torch.ones(6), tensor]),
        FINGERPRINT([tensor[:3], tensor[3:]]),
        Fingerprint(SecureRandom("test", seed=6))([tensor]),
    }
    assert len(prints) == 7
    swapped = torch.arange(8.0)
    assert FINGERPRINT([swapped]) != FINGERPRINT([swapped.flip(0)])


def test_a_long_tensor_that_does_not_begin_at_a_word() -> None:
    """A part of a flat buffer of bfloat16: its bytes could not be seen as words, and the step ended in a traceback."""
    fingerprint = Fingerprint(SecureRandom("here", seed=1))
    part = torch.arange(2 * ROW * ROWS + 3, dtype=torch.int16).view(torch.bfloat16)[1:]
    assert fingerprint([part]) == fingerprint([part.clone()])


def test_strange_layouts() -> None:
    """Contiguous by torch's word, but not words where they lie: a private step ended in a traceback."""
    strided = torch.arange(8, dtype=torch.float64).view(4, 2)[1:2, 0]
    negative = torch.tensor([1 + 2j]).conj().imag
    for tensor in (strided, negative, torch.zeros(4, 2, dtype=torch.float64)[:0, 0], torch.zeros(4, 2).half()[:0, 0]):
        assert FINGERPRINT([tensor]) == FINGERPRINT([tensor.detach().clone().resolve_neg()])
    assert FINGERPRINT([strided]) != FINGERPRINT([torch.zeros(1, dtype=torch.float64)])


def test_a_tensor_that_was_hashed_can_be_resized() -> None:
    """FSDP gives the memory of gathered parameters back."""
    for size in (10, ROW * ROWS + 9):
        t = torch.randn(size)
        FINGERPRINT([t])
        t.untyped_storage().resize_(0)
