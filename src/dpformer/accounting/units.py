"""What one sample of text is, in words: a guarantee is worth what it is a guarantee for."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["chunk", "line", "document", "author"]


@dataclass(frozen=True)
class UnitOfPrivacy:
    """Words for a privacy statement."""

    name: str
    plural: str
    whole: str  # what is there, or nothing in its place
    given: str
    meaning: str

    @property
    def adjacency(self) -> str:
        return f"zero-out: {self.whole} or nothing in its place; how many {self.plural} there are is public"


USER = UnitOfPrivacy(
    "user",
    "users",
    "one user's whole history",
    "a given user's history",
    "One user is one person's whole history in the data.",
)
UNITS: dict[str, UnitOfPrivacy] = {
    "chunk": UnitOfPrivacy(
        "chunk",
        "chunks",
        "one chunk of the text",
        "a given chunk",
        "One unit is a chunk: consecutive tokens at a fixed place of the file. Who wrote more than one chunk is "
        "protected chunk by chunk, not as a person, and a passage across a border is in two.",
    ),
    "line": UnitOfPrivacy(
        "line",
        "lines",
        "one line of the text",
        "a given line",
        "One unit is a line of the file. Who wrote more than one line is protected line by line, not as a person.",
    ),
    "document": UnitOfPrivacy(
        "document",
        "documents",
        "one document",
        "a given document",
        "One unit is a document. Who wrote more than one document is protected document by document, not as a person.",
    ),
    "author": UnitOfPrivacy(
        "author",
        "authors",
        "all that one author wrote",
        "what a given author wrote",
        "One unit is an author with all texts of that author in the data.",
    ),
}


def unit_of(name: str) -> UnitOfPrivacy:
    """The words of a statement's unit."""
    return USER if name == USER.name else UNITS[name]
