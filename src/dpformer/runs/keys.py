"""The key of a run, saved before anything is released: a run that dies and is resumed draws the same numbers again.

Without it a second start would release the same data a second time with other noise, and whoever saw both would know
more than ε says. Whoever has the key can take the noise off: the file is the owner's alone, and deleted at the end.
"""

from __future__ import annotations

from typing import Any

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.noise import SecureRandom
from dpformer.runs.checkpoint import check_identity, identity_of
from dpformer.runs.folder import RunFolder


def save_keys(folder: RunFolder, random: SecureRandom, *, config: str, data: str) -> None:
    """Writes the key, with the hashes of the config and the data that it is for."""
    content = {**identity_of(config, data), "random": random.state_dict()}
    with replacing(folder.keys) as part:
        part.touch(mode=0o600)
        part.write_text(folder.as_json(content), encoding="utf-8")


def load_keys(folder: RunFolder, *, config: str) -> dict[str, Any] | None:
    """What was saved, None if nothing was; keys of another config or version are refused."""
    if not folder.keys.exists():
        return None
    found = folder.read_json(folder.keys)
    check_identity(folder.keys, found, identity_of(config, found.get("data")))
    random, data = found.get("random"), found.get("data")
    key = random.get("key") if isinstance(random, dict) else None
    if (
        not isinstance(data, str)
        or not isinstance(key, str)
        or len(key) != 64
        or not set(key) <= set("0123456789abcdef")
    ):
        raise DpformerError(f"{folder.keys} does not hold the key of a run: start again with another --out")
    return found
