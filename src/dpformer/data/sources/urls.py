"""Logs given by a URL, such as `s3://bucket/logs` or `postgresql://host/shop`, and what a URL may contain.

A path made from a URL has lost a slash (`s3:/bucket/logs`), which is restored here. A URL is written to the run folder
and shown in messages, so it must not hold a secret: passwords and signatures come from the environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from dpformer.errors import DpformerError

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)  # a single letter would be a drive
_SECRET = re.compile(r"pass|pwd|secret|token|signature|credential|(^|[^a-z])(sig|key|auth)", re.IGNORECASE)
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Url:
    """A URL without secrets."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.text)

    @property
    def scheme(self) -> str:
        return self.parts.scheme

    @property
    def host(self) -> str:
        """The host, or the bucket, with its original case."""
        return self.parts.netloc

    @property
    def path(self) -> str:
        """The path without its leading slash, unescaped."""
        return unquote(self.parts.path.lstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine, so that no one can eavesdrop."""
        return self.parts.hostname in _LOCAL


def url_of(path: str | Path) -> Url | None:
    """The URL that a path stands for, None if it is a file; one with a secret is refused."""
    found = _URL.fullmatch(str(path))
    if found is None:
        return None
    scheme, rest = found.groups()
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        has_password, _ = parts.password is not None, parts.port
    except ValueError as error:
        raise DpformerError(f"a URL of {scheme}:// cannot be parsed ({error}): correct it") from None
    names = [pair.partition("=")[0] for pair in parts.query.split("&")]
    secret = next((name for name in names if _SECRET.search(name)), None)
    if has_password or secret is not None:
        what = "a password" if has_password else f"the secret {secret!r}"
        raise DpformerError(
            f"the URL at {parts.hostname} contains {what}, but URLs are stored in run folders and shown: remove it, "
            f"and set it in the environment ({_ENVIRONMENT.get(scheme, 'see the guide, Data in')})"
        )
    return Url(f"{scheme}://{rest}")


def resolved(path: Path) -> Path:
    """An absolute path; one that stands for a URL is returned unchanged."""
    return path.resolve() if url_of(path) is None else path


def called(path: Path) -> str:
    """The name of a path in messages."""
    return "standard input" if path.name == "-" else str(url_of(path) or path)


_ENVIRONMENT = {
    "postgresql": "PGPASSWORD, or ~/.pgpass",
    "mysql": "MYSQL_PWD, or ~/.my.cnf",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
}
