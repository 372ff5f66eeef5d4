"""Options of a run, declared once by the room that owns them: each section is a pydantic class of `option` fields.

`runs.config.Config` joins the sections; the command line, `config.toml` and the report read them from there.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def option(default: Any, text: str) -> Any:
    """A field with its help text."""
    return Field(default, description=text)


class Options(BaseModel):
    """A section of options; `section` is its title."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    section: ClassVar[str]
