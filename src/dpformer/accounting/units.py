"""The unit of privacy in words: what the guarantee protects."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["chunk", "line", "document", "author"]


@dataclass(frozen=True)
class UnitOfPrivacy:
    """Words for a privacy statement."""

    name: str
    plural: str
    whole: str  # what is added or removed
    given: str
    meaning: str

    @property
    def adjacency(self) -> str:
        return f"zero-out: adding or removing {self.whole}, while the number of {self.plural} stays public"


USER = UnitOfPrivacy(
    "user",
    "users",
    "one user's entire history",
    "a given user's history",
    "One user is one person's entire history in the data.",
)
UNITS: dict[str, UnitOfPrivacy] = {
    "example": UnitOfPrivacy(
        "example",
        "examples",
        "one example of the data set",
        "a given example",
        "One unit is an example, one item of the data set. Someone with several examples is protected example by "
        "example, not as a person.",
    ),
    "chunk": UnitOfPrivacy(
        "chunk",
        "chunks",
        "one chunk of the text",
        "a given chunk",
        "One unit is a chunk: consecutive tokens at a fixed place of the file. Someone who wrote several chunks is "
        "protected chunk by chunk, not as a person, and a passage across a boundary belongs to two chunks.",
    ),
    "line": UnitOfPrivacy(
        "line",
        "lines",
        "one line of the text",
        "a given line",
        "One unit is a line of the file. Someone who wrote several lines is protected line by line, not as a person.",
    ),
    "document": UnitOfPrivacy(
        "document",
        "documents",
        "one document",
        "a given document",
        "One unit is a document. Someone who wrote several documents is protected document by document, not as a "
        "person.",
    ),
    "author": UnitOfPrivacy(
        "author",
        "authors",
        "all texts of one author",
        "the texts of a given author",
        "One unit is an author with all of that author's texts in the data.",
    ),
}


def unit_of(name: str) -> UnitOfPrivacy:
    """The unit of privacy with this name."""
    return USER if name == USER.name else UNITS[name]
