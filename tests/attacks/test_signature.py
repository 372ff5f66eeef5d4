"""A signature covers every published byte of a run: no file can be changed, added, left out or exchanged unseen."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dpformer.runs.folder import RunFolder
from dpformer.statement.signature import check_signature, private_key, sign
from dpformer.verification.verify import verify
from tests.tiny_runs import copied, invoke, printed, refused, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

PUBLISHED = ("model.safetensors", "privacy.json", "config.toml", "releases.safetensors", "README.md")


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """(private, public) PEM files of a new key."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def signed(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> tuple[RunFolder, Path, Path]:
    """A run with a card, signed; the private and the public key."""
    run = copied(tiny_run(tmp_path_factory, model="counts"), tmp_path)
    private, public = write_keys(tmp_path, "owner")
    printed("card", run)
    assert printed("sign", run, "--key", private) == f"signed: {', '.join(sorted(PUBLISHED))}\n"
    return RunFolder(run), private, public


def finding(folder: RunFolder, key: Path) -> tuple[bool | None, str]:
    return next((f.ok, f.detail) for f in verify(folder.path, key=key).findings if f.name == "signature")


def test_it_is_of_its_owner_and_of_nobody_else(signed: tuple[RunFolder, Path, Path], tmp_path: Path) -> None:
    folder, _, public = signed
    result = verify(folder.path, key=public)
    assert result.passed and finding(folder, public)[0] is True
    assert finding(folder, write_keys(tmp_path, "other")[1])[0] is False
    folder.signature.unlink()
    assert finding(folder, public) == (False, "SHA256SUMS.sig is not here")


@pytest.mark.parametrize("name", [*PUBLISHED, "SHA256SUMS", "SHA256SUMS.sig"])
def test_every_published_byte_is_signed(signed: tuple[RunFolder, Path, Path], name: str) -> None:
    folder, _, public = signed
    path = folder.path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert check_signature(folder, public)
    path.unlink()
    assert check_signature(folder, public)


def test_words_of_somebody_else_in_the_deployment_show(signed: tuple[RunFolder, Path, Path]) -> None:
    folder, private, public = signed
    with folder.config.open("a") as config:
        config.write('\n[deployment]\nname = "Approved by someone else"\n')
    assert finding(folder, public) == (False, "config.toml is not the file that was signed")
    printed("sign", folder.path, "--key", private)
    assert finding(folder, public)[0] is True
    assert "sign again" in invoke("card", folder.path).stderr


@pytest.mark.parametrize("name", ["audit.json", "users.csv"])
def test_what_was_put_in_afterwards_shows(signed: tuple[RunFolder, Path, Path], name: str) -> None:
    folder, _, public = signed
    (folder.path / name).write_text("{}")
    ok, detail = finding(folder, public)
    assert ok is False and detail.startswith(f"{name} is not signed")


def test_an_unknown_file_is_never_called_checked(signed: tuple[RunFolder, Path, Path]) -> None:
    folder, _, _ = signed
    (folder.path / "users.csv").write_text("ann,film\n")
    result = verify(folder.path)
    assert "other files" in result.not_checked
    assert next(claim.ok for claim in result.claims if claim.name == "published files") is None


@pytest.mark.parametrize("line", ["../privacy.json", "/etc/passwd", "checkpoint/data.json", "a b", ".lock"])
def test_a_list_names_files_of_the_folder_alone(signed: tuple[RunFolder, Path, Path], line: str) -> None:
    """Even a signed list from someone else cannot cause other files to be read."""
    folder, private, public = signed
    text = folder.sums.read_text() + f"{'0' * 64}  {line}\n"
    folder.sums.write_text(text)
    folder.signature.write_bytes(private_key(private).sign(text.encode()))
    assert "is not a list of published files" in check_signature(folder, public)


def test_what_is_private_is_not_signed_nor_needed(signed: tuple[RunFolder, Path, Path], tmp_path: Path) -> None:
    folder, private, public = signed
    published = tmp_path / "published"
    published.mkdir()
    for name in (*PUBLISHED, "SHA256SUMS", "SHA256SUMS.sig"):
        shutil.copy(folder.path / name, published)
    assert check_signature(RunFolder(published), public) == ""
    said = refused("sign", folder.path, "--key", private, "--also", "metrics.jsonl")
    assert "must not be published" in said
    assert "cannot be signed" in refused("sign", folder.path, "--key", private, "--also", "../owner.pem")
    (folder.path / "report.html").write_text("<p>public</p>")
    assert "report.html" in sign(folder, private_key(private), ["report.html"])


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("sha256sum")), reason="needs openssl and sha256sum")
def test_openssl_and_sha256sum_agree(signed: tuple[RunFolder, Path, Path]) -> None:
    folder, _, public = signed
    sums = ["sha256sum", "--strict", "--check", "SHA256SUMS"]
    openssl = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin", "-in", "SHA256SUMS"]
    for command in (sums, [*openssl, "-sigfile", "SHA256SUMS.sig"]):
        found = subprocess.run(command, cwd=folder.path, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr + found.stdout


def test_wrong_keys_are_bad_input(signed: tuple[RunFolder, Path, Path], tmp_path: Path) -> None:
    folder, private, public = signed
    assert "is not a public key" in refused("verify", folder.path, "--key", private)
    assert "is not an unencrypted private key" in refused("train", "--sign", public, "--out", tmp_path / "new")
    assert "is not an unencrypted private key" in refused("sign", folder.path, "--key", public)
    assert invoke("sign", tmp_path / "none", "--key", private).exit_code != 0
