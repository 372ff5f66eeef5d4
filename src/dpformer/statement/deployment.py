"""`[deployment]`: what only the owner of a model can say about it, for the cards that go with it.

    [deployment]
    name = "Films for you"
    curator = "Example Ltd"
    …

It does not affect training: the hash of a config excludes it, and it may be written or changed afterwards.
"""

from __future__ import annotations

import sys
from datetime import date as Date
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dpformer.errors import DpformerError
from dpformer.files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIRED = ("name", "curator", "description", "intended_use", "date", "region", "authors")  # required by the registry


class Deployment(BaseModel):
    """All fields are optional; the OpenDP registry requires some of them (`REQUIRED`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    name: str | None = Field(default=None, min_length=1, description="Name of the published model.")
    curator: str | None = Field(default=None, min_length=1, description="Who publishes it.")
    description: str | None = Field(default=None, min_length=1, description="What it is, in one or two sentences.")
    intended_use: str | None = Field(default=None, min_length=1, description="What it is for, and what it is not for.")
    date: Date | None = Field(default=None, description="Date of publication, YYYY-MM-DD.")
    data_period: str | None = Field(
        default=None, min_length=1, description='Period of the data, such as "2024-01 to 2025-06".'
    )
    ids_are_persons: bool | None = Field(
        default=None, description="Whether a user id is one person; if not, ids_are says what it is."
    )
    ids: str | None = Field(
        default=None, min_length=1, description="What a user id is: an account, a device, a household."
    )
    access: str | None = Field(default=None, min_length=1, description="Who has access to data and model, and how.")
    justification: str | None = Field(default=None, min_length=1, description="Why this ε, this unit, these choices.")
    region: str | None = Field(
        default=None, min_length=1, description="Region of the people in the data, or whose laws apply."
    )
    sector: Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None = None
    many_releases: bool = Field(default=False, description="Whether it is published repeatedly.")
    dynamic: bool = Field(default=False, description="Whether new data comes in over time.")
    releases: str | None = Field(
        default=None, min_length=1, description="Further releases planned, and how they are counted."
    )
    license: str | None = Field(
        default=None, min_length=1, description="Licence of the model, by its Hugging Face name."
    )
    sources: str | None = Field(default=None, min_length=1, description="Addresses of papers, posts, the model itself.")
    authors: list[str] | None = Field(default=None, min_length=1, description="Who wrote these words.")

    @field_validator("date", mode="before")
    @classmethod
    def _iso(cls, value: Any) -> Any:
        """A TOML date, or text; never a number of seconds."""
        if type(value) is Date or value is None:
            return value
        try:
            return Date.fromisoformat(value)
        except (TypeError, ValueError):
            raise ValueError("must be a date, YYYY-MM-DD") from None

    @classmethod
    def read(cls, path: str | Path) -> Deployment:
        """The section of a TOML file."""
        try:
            found = tomllib.loads(read_text(Path(path))).get("deployment")
        except OSError as error:
            raise DpformerError(f"{path} cannot be read: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DpformerError(f"{path} is not TOML: {error}") from None
        if not isinstance(found, dict):
            raise DpformerError(f"{path} has no section [deployment]")
        return cls.of(found)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Deployment:
        """A deployment from a dict; errors are one sentence."""
        try:
            return cls(**values)
        except (ValidationError, TypeError) as error:
            raise DpformerError(sentence(error)) from None

    def missing(self) -> list[str]:
        """Fields that the registry requires and that are missing."""
        return [name for name in REQUIRED if getattr(self, name) is None]

    def filled(self) -> dict[str, Any]:
        """Fields that differ from their default."""
        return self.model_dump(exclude_defaults=True)


def sentence(error: Exception) -> str:
    """What is wrong with a section, in one sentence."""
    if not isinstance(error, ValidationError):
        return f"[deployment] cannot be read: {error}"
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "deployment")
    if first["type"] == "extra_forbidden":
        return f"[deployment] has an unknown key {where!r}; known keys are {', '.join(Deployment.model_fields)}"
    what = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{where or 'a value'} of [deployment] is {first['input']!r}: {what[0].lower()}{what[1:]}"
