"""Access control: host names, bearer tokens, and origins of web pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpformer.errors import DpformerError

LOCALHOST = "localhost"
LEAST_TOKEN = 16  # characters
HOST = re.compile(r"(?:\*\.)?[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\*", re.IGNORECASE)
ORIGIN = re.compile(r"https?://[a-z0-9.-]+(?::\d{1,5})?|https?://\[[0-9a-f:]+\](?::\d{1,5})?", re.IGNORECASE)
# Accessible without a token: health probes, and static files that are the same for every model.
OPEN_PATHS = frozenset(("/healthz", "/ready", "/", "/static/page.js", "/static/page.css"))


@dataclass(frozen=True)
class Access:
    """What a request must present before it is processed.

    Attributes:
        hosts: names that the `Host` header may have besides `localhost` and any IP address; `*.shop.example` for all
            subdomains of a name, `*` for all. This stops DNS rebinding: a page from elsewhere whose own name was
            pointed at this machine sends a name that is not among them.
        origins: web pages whose scripts may read answers (CORS), such as `https://shop.example`.
        tokens: SHA-256 of the bearer tokens; if empty, no token is required.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tokens: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, hosts: Sequence[str] = (), origins: Sequence[str] = (), token_file: Path | None = None) -> Access:
        """Validate the options; a token file has one token per line."""
        for host in hosts:
            if not HOST.fullmatch(host):
                raise DpformerError(f"--allow-host {host!r} is not a name such as shop.example or *.shop.example")
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise DpformerError(
                    f"--allow-origin {origin!r} is not an origin such as https://shop.example (no path, no *)"
                )
        tokens = () if token_file is None else _tokens(token_file)
        return cls(tuple(map(str.lower, hosts)), tuple(map(str.lower, origins)), tokens)

    def knows_host(self, header: bytes) -> bool:
        """Whether a `Host` header names this service."""
        name = _without_port(header.decode("latin-1").strip().lower())
        if not name:
            return False
        if name == LOCALHOST or _is_address(name):
            return True
        return any(_matches(name, host) for host in self.hosts)

    def knows_token(self, header: bytes) -> bool:
        """Whether an `Authorization` header carries one of the tokens."""
        if not self.tokens:
            return True
        kind, _, token = header.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found = [hmac.compare_digest(digest, known) for known in self.tokens]  # all of them, in constant time
        return kind.lower() == b"bearer" and any(found)


def _tokens(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise DpformerError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        raise DpformerError(
            f"{path} holds no token; create one with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    for line in lines:
        if len(line) < LEAST_TOKEN or not line.isascii():
            raise DpformerError(
                f"{path} holds a token of {len(line)} characters; tokens need at least {LEAST_TOKEN} ASCII characters"
            )
    return tuple(hashlib.sha256(line.encode()).digest() for line in lines)


def _without_port(host: str) -> str:
    """`localhost:8000` → `localhost`, `[::1]:8000` → `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, host: str) -> bool:
    return host in ("*", name) or (host.startswith("*.") and name.endswith(host[1:]))
