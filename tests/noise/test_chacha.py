"""ChaCha20 in tensor operations: the vectors of RFC 8439, and the cipher of OpenSSL."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.noise import SecureRandom
from dpformer.noise.chacha import keystream
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.gaussian import GROUP, normal_of_words
from dpformer.noise.noisy_sums import Numbers, release_sum
from tests import second_device
from tests.distributed import jobs
from tests.second_device import PLACE


def counter_of(nonce: str, block: int) -> int:
    return int.from_bytes(bytes.fromhex(nonce), "little") << 32 | block


# RFC 8439: 2.3.2, and test vectors 1 to 5 of appendix A.1: key, nonce, block, keystream
VECTORS = [
    (
        bytes(range(32)).hex(),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9"
        "cbd083e8a2503c4e",
    ),
    (
        bytes(32).hex(),
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11c"
        "c387b669b2ee6586",
    ),
    (
        bytes(32).hex(),
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45"
        "ace10a1f4b794d6f",
    ),
    (
        bytes(31).hex() + "01",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125"
        "a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b"
        "7374f4872e99f096",
    ),
    (
        bytes(32).hex(),
        "000000000000000000000002",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c78a970e0e955c14f3a88e741b97c286f75f8fc299e8148362"
        "fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize(("key", "nonce", "block", "wanted"), VECTORS)
def test_vectors_of_the_rfc(key: str, nonce: str, block: int, wanted: str) -> None:
    words = keystream(bytes.fromhex(key), counter_of(nonce, block), 1, "cpu")
    assert words.numpy().tobytes().hex() == wanted


@settings(max_examples=30)
@given(
    st.binary(min_size=32, max_size=32), st.integers(0, 2**48 - 1), st.integers(0, 2**48 - 1), st.integers(0, 2**32 - 4)
)
def test_the_same_words_as_openssl(key: bytes, step: int, stream: int, block: int) -> None:
    random = SecureRandom(key=key)
    words = keystream(random._cipher_key, random._counter(step, stream, block), 4, "cpu")
    wanted = random.words(32, step=step, stream=stream, start=8 * block)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), wanted)


def test_counters_do_not_wrap_round() -> None:
    with pytest.raises(ValueError, match="beyond the counter"):
        keystream(bytes(32), 2**32 - 2, 3, "cpu")


def test_numbers_made_by_tensor_operations_are_those_of_the_cpu() -> None:
    random, count = SecureRandom(seed=3), 10 * GROUP
    words = keystream(random._cipher_key, random._counter(7, 2, 0), count // 8, "cpu")
    torch.testing.assert_close(
        normal_of_words(words), torch.from_numpy(random.normal(count, step=7, stream=2)), rtol=1e-13, atol=1e-13
    )


def on_the_second_device() -> None:
    second_device.add()
    random, here = SecureRandom("x", seed=3), torch.randn(5000)
    there = torch.empty(3000, dtype=torch.float64, device=PLACE)
    random.fill_normal(there, step=2, stream=1, start=700)
    wanted = torch.from_numpy(random.normal(3000, step=2, stream=1, start=700))
    torch.testing.assert_close(there.cpu(), wanted, rtol=1e-13, atol=1e-13)
    sums = [torch.zeros(3000), torch.zeros(3000).to(PLACE)]
    for each in sums:
        release_sum(each, Numbers(random, 2, 1, 3000, 700), 1.0, 2.0)
    torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=0, atol=2**-10)
    assert Fingerprint(random)([here]) == Fingerprint(random)([here.to(PLACE)])


@pytest.mark.skipif(not second_device.POSSIBLE, reason=second_device.REASON)
def test_noise_is_made_on_the_device_of_the_sum() -> None:
    """The second device refuses whatever mixes with the CPU."""
    assert jobs.finish(jobs.start(1, on_the_second_device)) == [0]
