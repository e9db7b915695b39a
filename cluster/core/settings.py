"""What all groups of settings are made of: frozen, no unknown keys; and the kinds of values that several have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
