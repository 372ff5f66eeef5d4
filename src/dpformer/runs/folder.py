"""The run folder: its contents, which of them may be published (`CONTENTS`), who may write to it, and how it is created
atomically."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpformer.errors import DpformerError
from dpformer.files import lock_file, read_text, replacing, strict_json, write_text

LOCK = ".lock"


class Content(NamedTuple):
    """One entry of a run folder. What may not be published is readable by its owner alone."""

    name: str
    public: bool
    what: str


CONTENTS = (
    Content("model.safetensors", True, "the model: weights, vocabulary, noisy frequencies, the headline"),
    Content("privacy.json", True, "the statement, written last; it marks the run as finished"),
    Content("config.toml", True, "every option; nothing measured, but names of files and columns"),
    Content("releases.safetensors", True, "the noisy query results from which the model was made"),
    Content("audit.json", True, "the outcome of `dpformer audit`, on synthetic users"),
    Content("README.md", True, "the model card (`dpformer card`)"),
    Content("opendp.yaml", True, "the entry for OpenDP's registry (`dpformer card --opendp`)"),
    Content("dpia.md", True, "one page for a data protection officer (`dpformer card --dpia`)"),
    Content("SHA256SUMS", True, "hashes of all published files, if signed"),
    Content("SHA256SUMS.sig", True, "the signature (`--sign`, `dpformer sign`)"),
    Content("metrics.jsonl", False, "one line per step, and evaluations: exact statistics of the data"),
    Content("report.html", False, "curves of metrics.jsonl, exact accuracy; public if made with --public"),
    Content(
        "checkpoint", False, "keys and state of an unfinished run; hash and salt of the data, ranks, ownership mark"
    ),
)


class RunFolder:
    """Paths and atomic writes. Opening it changes nothing; `lock` it before writing."""

    PRIVATE = frozenset({"metrics.jsonl", "checkpoint"})  # never to be published

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.statement = self.path / "privacy.json"
        self.model = self.path / "model.safetensors"
        self.releases = self.path / "releases.safetensors"
        self.sums = self.path / "SHA256SUMS"
        self.signature = self.path / "SHA256SUMS.sig"
        self.private = self.path / "checkpoint"
        self.checkpoint = self.private / "state.safetensors"
        self.keys = self.private / "keys.json"
        self.budget = self.private / "budget.json"
        self.data = self.private / "data.json"
        self.owner = self.private / "owner"
        self.evaluation = self.private / "evaluation.npz"

    @classmethod
    def create(cls, path: str | Path, config: str) -> RunFolder:
        """Create a folder with its config, atomically; an existing one is refused."""
        folder = cls(path)
        folder.refuse_existing()
        part = folder.beside(".part")
        try:
            part.chmod(0o755)
            (part / folder.private.name).mkdir(mode=0o700)
            write_text(part / folder.config.name, config)
            os.rename(part, folder.path)
        except OSError as error:
            folder.refuse_existing()  # another process may have created it meanwhile
            raise DpformerError(f"{folder.path} cannot be created: {error.strerror}") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    def beside(self, suffix: str) -> Path:
        """A new hidden sibling folder, to be renamed to this one later."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=suffix, dir=self.path.parent))
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            raise DpformerError(f"{_shown(self.path)} cannot be created: {_reason(error)}") from None

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise DpformerError(f"{folder.path} is not a run folder: it has no config.toml")
        return folder

    def refuse_existing(self) -> None:
        if _exists(self.path):
            raise DpformerError(
                f"{self.path} already exists: resume it with --resume {self.path}, or choose another folder with --out"
            )

    @property
    def done(self) -> bool:
        """Whether the run has finished: the statement is written last."""
        return self.statement.is_file() and self.model.is_file()

    def published(self) -> list[str]:
        """Names of the files here that may be published, except the signature."""
        signing = {self.sums.name, self.signature.name}
        names = [content.name for content in CONTENTS if content.public and content.name not in signing]
        return [name for name in names if _exists(self.path / name)]

    def unknown(self) -> list[str]:
        """Names of entries that do not belong to a run."""
        known = {content.name for content in CONTENTS}
        return sorted(path.name for path in self.path.iterdir() if path.name not in known and path.name != LOCK)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the system releases the lock when this process ends, however it ends."""
        try:
            file = (self.path / LOCK).open("w")
        except OSError as error:
            raise DpformerError(f"{self.path} cannot be written to: {error.strerror}") from None
        with file:
            try:
                lock_file(file, wait=False)
            except OSError:
                raise DpformerError(f"another process is using {self.path}; wait for it, or stop it") from None
            for part in (*self.path.glob(".*.part"), *self.private.glob(".*.part")):
                part.unlink(missing_ok=True)  # left by a process that was killed while writing
            yield

    def write_json(self, path: Path, content: dict[str, Any]) -> None:
        write_text(path, self.as_json(content))

    @staticmethod
    def as_json(content: dict[str, Any]) -> str:
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def read_json(self, path: Path) -> dict[str, Any]:
        try:
            if not path.is_file():
                raise OSError("it is not a file")
            content = strict_json(read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            raise DpformerError(f"{path} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise DpformerError(f"{path} is not a JSON object")
        return content

    def forget_secrets(self) -> None:
        """Delete the keys and the state of a finished run."""
        for path in (self.checkpoint, self.keys, self.budget):
            path.unlink(missing_ok=True)

    def stray_secrets(self) -> list[Path]:
        """Files in checkpoint/ of a finished run that should not be there."""
        left = {self.data.name, self.owner.name, self.evaluation.name}
        return [path for path in self.private.iterdir() if path.name not in left] if self.private.is_dir() else []

    def refuse_released(self, *, by_steps: bool) -> None:
        """Refuse a model without its statement or the state that made it: another one would be a second release."""
        made_by = self.checkpoint if by_steps else self.keys
        if self.statement.exists():
            raise DpformerError(
                f"{self.path} holds a statement but no model: resuming would release another model of the same data; "
                "restore the model, or start again with another --out"
            )
        if self.model.exists() and not made_by.exists():
            raise DpformerError(
                f"{self.path} holds a model, but neither its statement nor its keys: resuming would release another "
                "model of the same data; start again with another --out, and delete this one"
            )


def _exists(path: Path) -> bool:
    """Whether the path exists; an invalid name or an unreadable parent folder becomes one sentence."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise DpformerError(f"{_shown(path)} cannot be created: {_reason(error)}") from None
    return True


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


class Metrics:
    """metrics.jsonl: lines are appended; on resume, those of steps that will be repeated are cut off."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        with replacing(path) as part:
            part.touch(mode=0o600)  # as private as the data
            part.write_text("".join(kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.close()
            raise DpformerError(f"{self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self.file.close()


def _whole_lines(path: Path) -> list[str]:
    """The lines up to the first that is not JSON: a killed process or a full disk may leave half a line."""
    lines: list[str] = []
    if path.is_file():  # not a named pipe, which would never end
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            if line.endswith("\n"):
                lines.append(line)
    return lines
