"""The schemas of requests and answers, which are also the OpenAPI documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dpformer.serving.limits import Limits

LIMITS = Limits()
Id = Annotated[str, Field(max_length=LIMITS.id_characters)]
Ids = Annotated[
    list[Id | int], Field(max_length=LIMITS.history, description="Item ids, oldest first. Never stored or logged.")
]
K = Annotated[int, Field(ge=1, le=LIMITS.k, description="Number of items.")]


Rule = Annotated[list[Id | int], Field(max_length=LIMITS.rule_items)]
Value = Id | int | float | bool


class Bounds(BaseModel):
    model_config = ConfigDict(extra="forbid")

    min: Annotated[float | None, Field(description="Smallest number allowed.")] = None
    max: Annotated[float | None, Field(description="Largest number allowed.")] = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


Unknown = Annotated[
    Literal["report", "ignore", "error"],
    Field(description="Items unknown to the model: ignored and counted in the answer, or refused (error)."),
]


class RecommendRequest(_Request):
    history: Ids = []
    unknown: Unknown = "report"
    k: K = 10
    filter_seen: Annotated[bool, Field(description="Exclude the items of the history.")] = True
    why: Annotated[bool, Field(description="Explain each item by the history.")] = False
    items: Annotated[Rule | None, Field(description="Recommend only these items.")] = None
    exclude: Annotated[Rule, Field(description="Never recommend these items.")] = []
    where: Annotated[
        dict[Id, Value | Annotated[list[Value], Field(max_length=LIMITS.k)] | Bounds],
        Field(max_length=LIMITS.rule_columns, description="Only items with these values of catalogue columns."),
    ] = {}
    max_per: Annotated[
        dict[Id, Annotated[int, Field(ge=1)]],
        Field(max_length=LIMITS.rule_columns, description="Maximum number of items per value of a column."),
    ] = {}

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"history": ["film-3", "film-9"], "k": 10}]}
    )


class ExplainRequest(_Request):
    history: Ids = []
    unknown: Unknown = "report"
    item_id: Id | int

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"history": ["film-3", "film-9"], "item_id": "film-4"}]}
    )


class Item(BaseModel):
    item_id: str
    title: str


class Contribution(Item):
    contribution: float
    attribute: Annotated[
        str | None, Field(description="The shared public attribute, if it contributes more than co-occurrence.")
    ] = None


class Recommendation(Item):
    score: Annotated[float, Field(description="For ranking: a logit or, for counts, the log of the evidence.")]
    why: list[Contribution] | None = None
    popularity: float | None = None


class Recommendations(BaseModel):
    history: Annotated[int, Field(description="Number of items of the history known to the model.")]
    unknown: Annotated[int, Field(description="Number of unknown items of the history, which are ignored.")]
    recommendations: list[Recommendation]
    method: str | None = None


class Similar(Item):
    similarity: Annotated[float, Field(description="A cosine, above 0 and at most 1.")]


class SimilarItems(BaseModel):
    items: list[Similar]


class Explanation(Item):
    unknown: int
    method: Annotated[str, Field(description="The meaning of the contributions.")]
    why: list[Contribution]
    popularity: float | None


class Items(BaseModel):
    items: list[Item]


class Alive(BaseModel):
    status: str


class Ready(BaseModel):
    ready: bool
    model: Annotated[str | None, Field(description="SHA-256 of model.safetensors.")]
    opened: Annotated[str, Field(description="When the model was opened, UTC.")]


class Health(BaseModel):
    status: str
    model: str
    items: int
    private: bool
    version: str


Statement = dict[str, Any]
