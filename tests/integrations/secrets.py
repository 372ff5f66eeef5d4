"""Reads every file that a run has written, and looks for its secrets in them."""

import base64
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

KEYS = ("noise", "sampling", "masks")


def secrets_of(vault: Path) -> list[bytes]:
    """The keys of a run and its hash of the data, each as it could be written: raw, pickled, hexadecimal, base64."""
    held = json.loads(vault.read_text())
    raw = [bytes.fromhex(text) for text in (*(held[name]["key"] for name in KEYS), held["data"])]
    assert len(set(raw)) == len(KEYS) + 1
    pickled = [key.decode("latin1").encode() for key in raw]  # as protocol 2, torch's, writes bytes
    return [*raw, *pickled, *(key.hex().encode() for key in raw), *(base64.b64encode(key)[:40] for key in raw)]


def contents(path: Path) -> Iterator[bytes]:
    """A file, and what is in it if it is an archive, as torch's are."""
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def no_secret_in(folder: Path, vault: Path) -> list[Path]:
    """All files of a folder but the one where keys belong; fails at the first that holds one."""
    secrets, read = secrets_of(vault), []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != vault:
            read.append(path)
            for content in contents(path):
                assert not any(secret in content.lower() or secret in content for secret in secrets), path
    assert read
    return read


def a_leak_is_found(folder: Path, vault: Path, saved: Path) -> None:
    """Puts the key into a file that a trainer saves, as the whole state of an optimizer would: that must be seen."""
    before = saved.read_bytes()
    key = json.loads(vault.read_text())["noise"]["key"]
    state: dict[str, Any] = torch.load(saved, weights_only=False)
    for leaked in ({"random": {"key": key}}, {"random": bytes.fromhex(key)}):
        torch.save({**state, **leaked}, saved)
        with pytest.raises(AssertionError):
            no_secret_in(folder, vault)
    saved.write_bytes(before)
    no_secret_in(folder, vault)
