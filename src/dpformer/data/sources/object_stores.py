"""Object stores: `s3://`, `gs://`, `az://`, and files of `https://`, by obstore.

obstore is one small library without dependencies for all of them (Apache Arrow's `object_store`, in Rust), configured
by the usual environment variables; PyArrow's file systems lack `https://`, and fsspec needs a library per store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

from dpformer.data.sources import delta, keys
from dpformer.data.sources.elsewhere import Asked, Brought, Source
from dpformer.data.sources.urls import Url
from dpformer.errors import DpformerError, MissingExtra

TIMEOUT = timedelta(seconds=20)  # for connecting, and for all attempts
_HOW = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; AWS_SKIP_SIGNATURE=true if public",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}


def bring(asked: Asked) -> Brought:
    """Copy the objects that a URL matches, each in the version that was listed; or read the Delta table there."""
    if _is_delta(asked.url):
        return delta.bring(asked)
    store, found = _found(asked.url)
    path = asked.url.path.rstrip("/")
    only = len(found) == 1 and found[0]["path"] == path
    root = str(PurePosixPath(path).parent) if only else keys.root(path)
    for meta in found:
        target = asked.folder / "objects" / PurePosixPath(meta["path"]).relative_to(root or ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        options: Any = {"if_match": meta["e_tag"]} if meta.get("e_tag") else {}
        with _sentences(asked.url), target.open("wb") as file:
            for block in _obstore().get(store, meta["path"], options=options).stream(min_chunk_size=1 << 22):
                file.write(block)
        if target.stat().st_size != meta["size"]:
            raise DpformerError(f"{asked.url} changed while it was read; try again")
    return Brought(target if only else asked.folder / "objects", asked.reading)


def state(url: Url) -> object:
    """Names, sizes and versions of the objects."""
    if _is_delta(url):
        return delta.state(url)
    _, found = _found(url)
    return [[meta["path"], meta["size"], meta.get("e_tag") or str(meta["last_modified"])] for meta in found]


SOURCES = (Source(("s3", "gs", "az", "https", "http"), bring, state),)


def _found(url: Url) -> tuple[Any, list[Any]]:
    """The store, and its metadata of each object that a URL matches: one, all below a folder, or by a glob."""
    store, path = _store(url), url.path.rstrip("/")
    with _sentences(url):
        if url.scheme.startswith("http"):
            return store, [_obstore().head(store, path)]
        one = None if keys.GLOB.search(path) or not path else _head(store, path)
        folder = keys.root(path)
        listed = [one] if one is not None else [meta for batch in _list(store, folder) for meta in batch]
        above = [str(up) for up in PurePosixPath(folder).parents if str(up) != "."]
        marks = [f"{up}/{mark}" for up in above for mark, _ in keys.MARKS.values()]
        beside = [meta for mark in marks for meta in next(_list(store, mark, 100), [])]
        keys.refuse_tables(url, (meta["path"] for meta in (*listed, *beside)))
    if one is not None:
        return store, listed
    by_key = {str(meta["path"]): meta for meta in listed}
    found = [by_key[key] for key in keys.chosen(path, by_key)]
    if not found:
        raise DpformerError(f"nothing found at {url}")
    return store, found


def _is_delta(url: Url) -> bool:
    """Whether a URL names the folder of a Delta table."""
    path = url.path.rstrip("/")
    if url.scheme.startswith("http") or not path or keys.GLOB.search(path):
        return False
    with _sentences(url):
        return any(meta["path"].endswith(".json") for meta in next(_list(_store(url), f"{path}/_delta_log", 100), []))


def _store(url: Url) -> Any:
    _obstore()
    from obstore import store

    timed: Any = {"connect_timeout": TIMEOUT, "timeout": 30 * TIMEOUT}
    options: Any = {"client_options": timed, "retry_config": {"max_retries": 2, "retry_timeout": TIMEOUT}}
    with _sentences(url):
        if url.scheme.startswith("http"):
            if url.scheme == "http" and not url.is_local:
                raise DpformerError(f"{url} would transfer private data unencrypted: give https://")
            if url.parts.query:
                raise DpformerError(
                    f"{url.parts.hostname}: URLs with a query (?…) are not supported: give the URL of a file"
                )
            timed["allow_http"] = url.is_local
            return store.HTTPStore.from_url(f"{url.scheme}://{url.host}/", **options)
        variable = "AZURE_ALLOW_HTTP" if url.scheme == "az" else "AWS_ALLOW_HTTP"
        timed["allow_http"] = os.environ.get(variable, "").lower() == "true"
        if url.scheme == "s3":
            return store.S3Store(url.host, **options)
        if url.scheme == "gs":
            return store.GCSStore(url.host, **options)
        return store.AzureStore(url.host, **options)


def _head(store: Any, path: str) -> Any:
    """A store's metadata of one object; None if there is none of this name."""
    from obstore.exceptions import NotFoundError

    try:
        return _obstore().head(store, path)
    except (NotFoundError, FileNotFoundError):
        return None


def _list(store: Any, folder: str, chunk: int = 1000) -> Iterator[Any]:
    return iter(_obstore().list(store, prefix=folder or None, chunk_size=chunk))


@contextmanager
def _sentences(url: Url) -> Iterator[None]:
    """Turn an error of a store into one sentence without its details, which may hold a secret."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("obstore") and not isinstance(error, FileNotFoundError):
            raise
        raise DpformerError(_said(url, type(error).__name__, str(error))) from None


def _said(url: Url, kind: str, details: str) -> str:
    how = _HOW.get(url.scheme, "it must be readable without a password")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"{url} cannot be read with the credentials in the environment ({how})"
    if kind in ("NotFoundError", "FileNotFoundError") or "NoSuchBucket" in details:
        return f"nothing found at {url}"
    if kind == "PreconditionError":
        return f"{url} changed while it was read; try again"
    if any(word in details for word in ("error sending request", "onnect", "timed out")):
        return f"{url} cannot be reached within {TIMEOUT.seconds} s: check the address ({how})"
    return f"{url} cannot be read: check address and credentials ({how})"


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise MissingExtra("obstore", "cloud") from None
    return obstore
