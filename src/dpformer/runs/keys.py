"""The secret key of a run: saved before anything is released, committed to in the statement, optionally kept.

All random numbers of a run are derived from one key drawn from the operating system: noise, sampling, initial weights,
dropout.

- *Saved* in the run folder before anything is released, so that a run that is killed and resumed draws the same numbers
again. A restart under another key would release the same data again with other noise, and anyone who saw both
releases would know more than ε allows. The file is deleted when the run has finished.
- *Committed to*: the statement holds a hash of the key, which reveals nothing about it (the key has 256 random bits)
and identifies it. Anyone given key and data later can repeat the run bit for bit (`dpformer verify --replay`).
- *Kept*, if the owner asks for it (`dpformer train --key-file FILE`), outside the run folder. The key may allow
removing the noise, so the file is as sensitive as the data.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.files import regular, strict_json, write_text
from dpformer.noise import SecureRandom
from dpformer.noise.randomness import KEY_BYTES
from dpformer.runs.checkpoint import check_identity, identity_of
from dpformer.runs.folder import RunFolder

FORMAT = 1
DOMAIN = b"dpformer run key commitment\n"
KEPT = {"format", "key", "private", "processes", "processor"}


def save_keys(folder: RunFolder, random: SecureRandom, *, config: str, data: str) -> None:
    """Write the key to the run folder, with the hashes of the config and the data it belongs to."""
    content = {**identity_of(config, data), "random": random.state_dict()}
    write_text(folder.keys, folder.as_json(content), private=True)


def load_keys(folder: RunFolder, *, config: str) -> dict[str, Any] | None:
    """The saved key, or None; keys of another config or version are refused."""
    if not folder.keys.exists():
        return None
    found = folder.read_json(folder.keys)
    check_identity(folder.keys, found, identity_of(config, found.get("data")))
    random, data = found.get("random"), found.get("data")
    if not isinstance(data, str) or not isinstance(random, dict) or not _is_key(random.get("key")):
        raise DpformerError(f"{folder.keys} does not hold the key of a run: start again with another --out")
    return found


def commitment(random: SecureRandom) -> str:
    """The hash of the key, for the statement."""
    return commitment_of(bytes.fromhex(str(random.state_dict()["key"])))


def commitment_of(key: bytes) -> str:
    return hashlib.sha256(DOMAIN + key).hexdigest()


# The key file of the owner.


def keep_key(path: Path, random: SecureRandom, *, processes: int = 1) -> None:
    """Write the key to a file for the owner, with everything else that bit-for-bit repetition depends on."""
    facts = {"format": FORMAT, **random.state_dict(), "processes": processes, "processor": processor()}
    write_text(path, RunFolder.as_json(facts), private=True)


def refuse_kept(path: Path | None) -> None:
    """Refuse to overwrite a key: the run that it belongs to could no longer be replayed."""
    if path is not None and path.exists():
        raise DpformerError(f"{path} already exists, and keys are never overwritten: give another file with --key-file")


def read_kept_key(path: Path) -> dict[str, Any]:
    """The contents written by `keep_key`, with the key as `random`."""
    try:
        if problem := regular(path):
            raise ValueError(problem)
        found = strict_json(path.read_bytes())
        if (
            not isinstance(found, dict)
            or found.keys() != KEPT
            or found["format"] != FORMAT
            or not _is_key(found["key"])
        ):
            raise ValueError("it holds no key")
        if type(found["private"]) is not bool or type(found["processes"]) is not int:
            raise ValueError("its fields have other types")
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DpformerError(f"{path} is not a key file written by dpformer train --key-file: {reason}") from None
    state = {name: found[name] for name in ("key", "private")}
    return {**found, "random": SecureRandom("run").with_state(state)}


def processor() -> str:
    """What rounding depends on: the architecture and torch's instruction set."""
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _is_key(text: object) -> bool:
    return isinstance(text, str) and len(text) == 2 * KEY_BYTES and set(text) <= set("0123456789abcdef")
