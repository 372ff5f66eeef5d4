"""The verifier that imports nothing of dpformer agrees with `dpformer verify`, on honest runs and on forged ones."""

import ast
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from dpformer.accounting import Gaussian, PoissonGaussian
from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.attack_rates import attack_rates
from dpformer.accounting.searches import repeated_epsilon
from dpformer.runs import load_release, save_release
from dpformer.verification import standalone
from dpformer.verification.standalone import Event, Published, curve_of, epsilon_of_search, is_signed, most_found
from dpformer.verification.verify import verify
from tests.attacks.test_signature import write_keys
from tests.tiny_runs import copied, printed, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

SOURCE = Path(standalone.__file__)


def test_a_signature_is_of_a_list_of_published_files(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Any list of hashes that the owner had signed for another purpose passed."""
    run, (private, public) = (
        copied(tiny_run(tmp_path_factory, model="counts", seed=None), tmp_path),
        write_keys(tmp_path, "key"),
    )
    printed("sign", run, "--key", private)
    claim = "the owner of a certain key published it"
    assert own(run, public)[claim] is True
    text = (run / "SHA256SUMS").read_text().replace("# The published", "# Other")
    (run / "SHA256SUMS").write_text(text)
    key = load_pem_private_key(private.read_bytes(), password=None)
    assert isinstance(key, Ed25519PrivateKey)
    (run / "SHA256SUMS.sig").write_bytes(key.sign(text.encode()))
    assert own(run, public)[claim] is False
    assert not next(one for one in verify(run, key=public).findings if one.name == "signature").ok


def test_one_file_that_needs_numpy_alone() -> None:
    source = SOURCE.read_text()
    assert len(source.splitlines()) <= 600
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in imports
    }
    assert names - set(sys.stdlib_module_names) == {"numpy"}


def own(run: Path, key: Path | None = None) -> dict[str, bool | None]:
    """What the verifier finds, run as a stranger runs it: as a file, where no dpformer can be imported."""
    command = [sys.executable, "-I", "-c", ALONE, str(SOURCE), str(run), "--json"]
    done = subprocess.run(command + (["--key", str(key)] if key else []), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] is (done.returncode == 0)
    return {claim["claim"]: claim["ok"] for claim in found["claims"]}


ALONE = """
import runpy, sys
class Nobody:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("dpformer", "dp_accounting", "scipy", "torch"): raise ImportError(name)
sys.meta_path.insert(0, Nobody())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

HONEST: list[dict[str, Any]] = [
    {"model": "counts"},
    {"model": "counts", "catalog": None, "private_metrics": True},
    {"epochs": 1, "private_metrics": True, "clipping": "clip"},
    {"epochs": 2, "bands": 2, "batch_size": 15},
    {"epochs": 1, "warm_start": 0.5},
    {"epochs": 1, "epsilon": math.inf},
]


@pytest.mark.parametrize("choices", HONEST, ids=str)
def test_honest_runs_pass_both(choices: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tiny_run(tmp_path_factory, **{"seed": None, **choices})
    assert verify(run).passed
    found = own(run)
    assert False not in found.values()
    private = choices.get("epsilon") != math.inf
    assert (found.get("the noise was drawn, and nothing but noisy sums is in the model", "") is None) == private


# The accountant.

CASES: list[tuple[list[tuple[float, float, int]], float]] = [
    ([(3.2923, 1024 / 6040, 590)], 1 / 6040),
    ([(1.0173, 256 / 31013, 12115)], 1 / 310130),
    ([(4.0, 1e-4, 100_000)], 1e-6),
    ([(8.0, 1.0, 1), (3.31, 1024 / 6040, 590), (20.0, 1.0, 2)], 1 / 60400),
    ([(0.5, 0.2, 10)], 1e-5),
    ([(1.0, 1.0, 1)], 1e-5),
    ([(0.3, 0.001, 50)], 1e-7),
]


@pytest.mark.parametrize(("events", "delta"), CASES)
def test_two_accountants_that_share_no_code_agree(events: list[tuple[float, float, int]], delta: float) -> None:
    theirs = [Gaussian(s, count) if q == 1 else PoissonGaussian(s, q, count) for s, q, count in events]
    curve, epsilon = curve_of([Event(*one) for one in events], delta)
    assert epsilon == pytest.approx(epsilon_of(theirs, delta), rel=1e-3)
    found = most_found(curve.delta, epsilon, 0.01)
    assert found == pytest.approx(attack_rates(theirs, delta).true_positive_rate, rel=1e-2)


def test_never_below_the_closed_form() -> None:
    from dp_accounting import get_epsilon_gaussian

    for sigma in (0.4, 1.0, 3.0, 12.0):
        exact = get_epsilon_gaussian(sigma / 2, 1e-6)  # four releases
        found = curve_of([Event(sigma, 1.0, 4)], 1e-6)[1]
        assert exact * (1 - 1e-6) <= found <= exact * (1 + 1e-3)


def test_searches() -> None:
    once = [(3.5, 1024 / 6040, 590), (20.0, 1.0, 1)]
    theirs = repeated_epsilon([PoissonGaussian(*once[0]), Gaussian(20.0)], 10.0, 1e-5)
    assert 0.98 * theirs < epsilon_of_search([Event(*one) for one in once], 10.0, 1e-5) <= 1.001 * theirs


# Forgeries: contradicted by both.

Change = Callable[[dict[str, Any]], Any]


def rewritten(run: Path, change: Change, also_the_model: bool = True) -> None:
    """A forger edits the statement, and makes the metadata of the model agree."""
    facts = json.loads((run / "privacy.json").read_text())
    change(facts)
    if also_the_model:
        release = load_release(run / "model.safetensors")
        shared = {name: facts[name] for name in ("headline", "private", "epsilon", "delta")}
        save_release(
            run / "model.safetensors",
            release.model,
            vocabulary=release.vocabulary,
            titles=release.titles,
            metadata={**release.metadata, **shared},
            frequencies=release.frequencies,
        )
        facts["hashes"]["model"] = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    (run / "privacy.json").write_text(json.dumps(facts))


def event(**changes: Any) -> Change:
    return lambda facts: facts["events"][-1].update(changes)


FORGERIES: dict[str, tuple[Change, str]] = {
    "a smaller ε": (lambda facts: facts.update(epsilon=1.0), "ε follows from the ledger"),
    "a smaller δ": (lambda facts: facts.update(delta=1e-9), "ε follows from the ledger"),
    "less noise": (event(noise_multiplier=0.6), "ε follows from the ledger"),
    "fewer steps": (event(steps=1), "the ledger is what config.toml asks for"),
    "another rate": (event(sample_rate=0.01), "the ledger is what config.toml asks for"),
    "no training": (lambda facts: facts["events"].pop(), "the ledger is what config.toml asks for"),
    "no such event": (event(kind="magic"), "ε follows from the ledger"),
    "seeded noise": (event(private=False), "ε follows from the ledger"),
    "a weaker attacker": (
        lambda facts: facts["attack"].update(true_positive_rate=0.02),
        "the bound on attacks follows from the ledger",
    ),
    "a headline of 0.1": (
        lambda facts: facts.update(headline=facts["headline"].replace("ε = ", "ε = 0.1, that is ")),
        "the headline says no less than ε and δ",
    ),
    "another unit": (
        lambda facts: facts.update(unit="author", headline=facts["headline"].replace("User-", "Author-")),
        "the ledger is what config.toml asks for",
    ),
    "a key of a seed": (
        lambda facts: facts.update(
            key_commitment=hashlib.sha256(
                b"dpformer run key commitment\n" + hashlib.sha256(b"dpformer seed 7").digest()
            ).hexdigest()
        ),
        "the key of the random numbers cannot be guessed",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_statements_fail_both(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    change, claim = FORGERIES[name]
    run = copied(tiny_run(tmp_path_factory, seed=None, epochs=1), tmp_path)
    rewritten(run, change)
    assert not verify(run).passed
    assert Published(run).lines() and own(run)[claim] is False


def test_a_count_that_was_hidden_in_the_file_fails_both(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = copied(tiny_run(tmp_path_factory, seed=None, epochs=1), tmp_path)
    path = run / "model.safetensors"
    raw = path.read_bytes()
    (size,) = np.frombuffer(raw[:8], "<u8")
    header = json.loads(raw[8 : 8 + int(size)])
    header["raw_counts"] = {"dtype": "U8", "shape": [3], "data_offsets": [len(raw) - 8 - int(size)] * 2}
    header["raw_counts"]["data_offsets"][1] += 3
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + int(size) :] + b"abc")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(run, lambda facts: facts["hashes"].update(model=digest), also_the_model=False)
    assert not verify(run).passed and own(run)["the model file has the parts of a model and no other bytes"] is False
    path.write_bytes(raw + b"alice")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(run, lambda facts: facts["hashes"].update(model=digest), also_the_model=False)
    assert not verify(run).passed and own(run)["the model file has the parts of a model and no other bytes"] is False


def test_a_list_of_items_that_nobody_paid_for_fails_both(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = copied(tiny_run(tmp_path_factory, seed=None, epochs=1), tmp_path)
    config = run / "config.toml"
    config.write_text("\n".join(line for line in config.read_text().split("\n") if not line.startswith("catalog")))
    assert not verify(run).passed and own(run)["the ledger is what config.toml asks for"] is False


# Signatures.


def test_the_vectors_of_rfc_8032() -> None:
    key = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert is_signed(b"\x72", signature, key) and not is_signed(b"\x73", signature, key)
    changed = signature[:40] + bytes([signature[40] ^ 1]) + signature[41:]
    assert not is_signed(b"\x72", changed, key)


def test_a_signature_holds_for_both_until_a_byte_changes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, claim = copied(tiny_run(tmp_path_factory, model="counts"), tmp_path), "the owner of a certain key published it"
    private, public = write_keys(tmp_path, "owner")
    printed("sign", run, "--key", private)
    assert own(run, public)[claim] is True and own(run)[claim] is None
    assert own(run, write_keys(tmp_path, "other")[1])[claim] is False
    (run / "config.toml").write_text((run / "config.toml").read_text() + '\n[deployment]\npublisher = "Eve"\n')
    assert own(run, public)[claim] is False and not verify(run, key=public).passed
    (run / "opendp.yaml").write_text("x")
    assert own(run)[claim] is False


# An untrusted folder.


@pytest.mark.parametrize("text", ['{"epsilon": 1, "epsilon": 2}', '{"epsilon": NaN}', "[1]", "x", "[" * 100_000])
def test_statements_that_are_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("epsilon = 5.0\n")
    (tmp_path / "privacy.json").write_text(text)
    assert standalone.main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1


def test_a_pipe_is_not_waited_for(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = copied(tiny_run(tmp_path_factory, model="counts"), tmp_path)
    (run / "model.safetensors").unlink()
    os.mkfifo(run / "model.safetensors")
    assert own(run)["the files are those of the statement"] is False
