"""A signature under the statement: Ed25519, over `privacy.json` byte by byte, in `privacy.json.sig`.

The statement holds the hashes of model and config, so the signature binds all three. It says who vouches for the run,
not that the run is right; for that there is `verify`. Keys are PEM files, as openssl makes them:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpformer.errors import DpformerError
from dpformer.files import write_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from dpformer.runs.folder import RunFolder

CONTEXT = b"dpformer privacy statement\n"  # so that it is a signature of nothing else
HOW = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"


def private_key(path: Path) -> Ed25519PrivateKey:
    """Reads the key to sign with; before a run begins, so that a wrong one costs nothing."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise DpformerError(f"{path} is no private key without a password ({error}); {HOW}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise DpformerError(f"{path} is no Ed25519 key; {HOW}")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """Reads the key to check with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(path))
    except ValueError as error:
        raise DpformerError(f"{path} is no public key in PEM ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DpformerError(f"{path} is no Ed25519 key")
    return key


def sign(folder: RunFolder, key: Ed25519PrivateKey) -> None:
    """Signs the statement of a finished run."""
    write_text(folder.signature, key.sign(CONTEXT + folder.statement.read_bytes()).hex() + "\n")


def check_signature(folder: RunFolder, key: Path) -> bool:
    """Whether the signature is one of the owner of this key, under this very statement."""
    from cryptography.exceptions import InvalidSignature

    found = public_key(key)
    try:
        signature = bytes.fromhex(folder.signature.read_text(encoding="ascii").strip())
        found.verify(signature, CONTEXT + folder.statement.read_bytes())
    except (InvalidSignature, ValueError, OSError):
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2**16)
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
