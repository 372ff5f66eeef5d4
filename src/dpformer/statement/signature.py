"""Signatures of published runs: Ed25519, over the SHA-256 of *every* published file.

`SHA256SUMS` lists the published files with their hashes, as `sha256sum` does, and `SHA256SUMS.sig` signs that list. So
a single changed byte is detected: of the weights, a sentence in the card, the name in config.toml's [deployment]. A
signature says who vouches for these bytes, not that the run is right; that is what `verify` checks. Checking a
signature does not require dpformer:

    sha256sum --check SHA256SUMS
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig

Keys are PEM files, as made by openssl:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.errors import DpformerError
from dpformer.files import regular, replacing, write_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from dpformer.runs.folder import RunFolder

TITLE = "# The published files of a run of dpformer\n"  # so that the signature cannot be taken for one of anything else
LARGEST = 2**40  # maximum size of a published file, in bytes
_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({_NAME.pattern})", re.ASCII)
HOW = "create one with: openssl genpkey -algorithm ed25519 -out key.pem"


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read the signing key; called before a run begins, so that a wrong key costs nothing."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise DpformerError(f"{path} is not an unencrypted private key ({error}); {HOW}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise DpformerError(f"{path} is not an Ed25519 key; {HOW}")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """Read the key for checking signatures."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(path))
    except ValueError as error:
        raise DpformerError(f"{path} is not a public key in PEM format ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DpformerError(f"{path} is not an Ed25519 key")
    return key


def sign(folder: RunFolder, key: Ed25519PrivateKey, also: Sequence[str] = ()) -> list[str]:
    """Sign the published files of a finished run and return their names.

    Args:
        folder: the run.
        key: the private key.
        also: names of further files in the folder to publish, such as a report made with --public.
    """
    if private := sorted(set(also) & folder.PRIVATE):
        raise DpformerError(f"{private[0]} is not covered by the guarantee and must not be published")
    listed = sorted({*folder.published(), *also})
    for name in listed:
        if problem := f"{name!r} is not the name of a file in it" * (not _NAME.fullmatch(name)) or regular(
            folder.path / name, LARGEST
        ):
            raise DpformerError(f"{folder.path} cannot be signed: {problem}")
    text = TITLE + "".join(f"{_sha256(folder.path / name)}  {name}\n" for name in listed)
    folder.signature.unlink(missing_ok=True)  # never leave an old signature beside a new list
    write_text(folder.sums, text)
    with replacing(folder.signature) as part:
        part.write_bytes(key.sign(text.encode()))
    return listed


def check_signature(folder: RunFolder, key: Path) -> str:
    """What is wrong with the signature by this key's owner; empty if it covers every published byte.

    Private files of the folder (metrics, checkpoint) are not published, hence not signed.
    """
    from cryptography.exceptions import InvalidSignature

    known = public_key(key)
    for path in (folder.sums, folder.signature):
        if problem := regular(path):
            return problem
    text = folder.sums.read_bytes()
    try:
        known.verify(folder.signature.read_bytes(), text)
        listed = _listed(text.decode("ascii"))
    except InvalidSignature:
        return "not made by the owner of this key"
    except ValueError as error:
        return f"{folder.sums.name} is not a list of published files: {error}"
    for name, expected in listed.items():
        if problem := regular(folder.path / name, LARGEST):
            return f"{problem}, but it is in the signed list"
        if _sha256(folder.path / name) != expected:
            return f"{name} is not the file that was signed"
    if unsigned := sorted({*folder.published(), *folder.unknown()} - listed.keys()):
        return f"{unsigned[0]} is not signed; the owner can sign again with dpformer sign"
    return ""


def outdated(folder: RunFolder) -> str:
    """A note after writing to a folder that was signed before; empty if it was not signed."""
    there = folder.signature.exists()
    return f"note: {folder.path} was signed before this change: sign again with dpformer sign" if there else ""


def _listed(text: str) -> dict[str, str]:
    """Name → SHA-256."""
    title, *lines = text.splitlines()
    found = [_LINE.fullmatch(line) for line in lines]
    if f"{title}\n" != TITLE or not all(found):
        raise ValueError("it is not a list of SHA-256 and names")
    listed = {match[2]: match[1] for match in found if match is not None}
    if len(listed) < len(lines):
        raise ValueError("a file is listed twice")
    return listed


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2**16)
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
