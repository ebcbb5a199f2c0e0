"""Where a model is, and how it lies there; part of each table `[models.NAME]`."""

from typing import Literal

from pydantic import BaseModel, Field, PositiveInt

#: Those that the task of a model has, too.
PLACE_OPTIONS = ("devices", "replicas", "pinned")


class PlaceSettings(BaseModel):
    """The devices of a model, and its parts on a device of several."""

    devices: list[str] | None = Field(
        None, min_length=1, description="Devices of the worker that have it; all if unset."
    )
    replicas: PositiveInt | None = Field(
        None, description="On how many devices it is; the worker chooses which."
    )
    pinned: bool = Field(
        False, description="Whether it stays loaded, whatever else needs the memory."
    )
    split: Literal["layers", "pipeline"] = Field(
        "layers",
        description="On a device such as `cuda:0+cuda:1`, each part of which has some layers:"
        " one pass at a time, or one on each part.",
    )
    layer_memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory of layers on the first part of such a device; four fifths of what"
        " is free if unset.",
    )
