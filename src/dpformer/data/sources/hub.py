"""Data sets of the Hugging Face Hub: `hf://datasets/OWNER/NAME/path`, with `@REVISION` after the name if it matters.

Files are copied in the state of one commit, whose hash is the snapshot. A token comes from HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dpformer.data.sources import keys
from dpformer.data.sources.elsewhere import Asked, Brought, Source
from dpformer.data.sources.urls import Url
from dpformer.engines.duckdb_connection import first_line
from dpformer.errors import DpformerError, MissingExtra

TIMEOUT = 20  # seconds


@dataclass(frozen=True)
class _Files:
    """Files of a data set in the state of a commit; `path` is what the URL means of them."""

    name: str
    commit: str
    path: str
    keys: list[str]


def bring(asked: Asked) -> Brought:
    """Copies the files that a URL means, in the state of the current commit or of the one that is given."""
    found, folder = _found(asked.url, asked.reading.snapshot), asked.folder / "hub"
    with _sentences(asked.url):
        for key in found.keys:
            _library().hf_hub_download(
                found.name, key, repo_type="dataset", revision=found.commit, local_dir=folder, etag_timeout=TIMEOUT
            )
    below = found.path if found.keys == [found.path] else keys.root(found.path)
    return Brought(folder / below, replace(asked.reading, snapshot=None), snapshot=found.commit)


def state(url: Url) -> object:
    """The commit."""
    return _found(url, None).commit


SOURCES = (Source(("hf",), bring, state),)


def _found(url: Url, commit: str | None) -> _Files:
    owner, _, rest = url.path.partition("/")
    name, _, path = rest.partition("/")
    name, _, revision = name.partition("@")
    if url.host != "datasets" or not name:
        raise DpformerError(f"{url} names no data set: give hf://datasets/OWNER/NAME/path")
    with _sentences(url):
        info = _library().HfApi().dataset_info(f"{owner}/{name}", revision=commit or revision or None, timeout=TIMEOUT)
    there, path = [str(file.rfilename) for file in info.siblings or ()], path.rstrip("/")
    if path in there:
        return _Files(f"{owner}/{name}", str(info.sha), path, [path])
    below = [key for key in there if not path or keys.GLOB.search(path) or key.startswith(f"{path}/")]
    keys.refuse_tables(url, below)
    wanted = keys.chosen(path, below)
    if not path:  # what every repository has besides its data
        wanted = [key for key in wanted if not key.lower().endswith((".md", "license"))]
    if not wanted:
        raise DpformerError(f"nothing found at {url}")
    return _Files(f"{owner}/{name}", str(info.sha), path, wanted)


@contextmanager
def _sentences(url: Url) -> Iterator[None]:
    try:
        yield
    except DpformerError:
        raise
    except Exception as error:
        raise DpformerError(_said(url, error)) from None


def _said(url: Url, error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        return f"there is no data set at {url}, or it may not be read with the token that is given (HF_TOKEN)"
    if kind in ("RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"nothing found at {url} in that revision"
    if not isinstance(error, (OSError, ValueError)) and "http" not in type(error).__module__:
        raise error
    if "onnect" in str(error) or "timed out" in str(error) or "onnect" in kind or "Timeout" in kind:
        return f"{url} cannot be reached within {TIMEOUT} s: is the network there, and HF_ENDPOINT right?"
    return f"{url} cannot be read: {first_line(error)}"


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtra("huggingface_hub", "hub") from None
    return huggingface_hub
