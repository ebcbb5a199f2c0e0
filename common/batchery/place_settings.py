"""Where a model is, and how it lies there; part of each table `[models.NAME]`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

#: Those that the task of a model has, too.
PLACE_OPTIONS = ("devices", "replicas", "pinned")


class PlaceSettings(BaseModel):
    """The devices of a model, and its parts on a device of several."""

    devices: Annotated[
        list[str] | None,
        Field(min_length=1, description="Devices of the worker that have it; all if unset."),
    ] = None
    replicas: Annotated[
        int | None,
        Field(gt=0, description="On how many devices it is; the worker chooses which."),
    ] = None
    pinned: Annotated[
        bool, Field(description="Whether it stays loaded, whatever else needs the memory.")
    ] = False
    split: Annotated[
        Literal["layers", "pipeline"],
        Field(
            description="On a device such as `cuda:0+cuda:1`, each part of which has some layers:"
            " one pass at a time, or one on each part."
        ),
    ] = "layers"
    layer_memory_bytes: Annotated[
        int | None,
        Field(
            gt=0,
            description="Memory of layers on the first part of such a device; four fifths of what"
            " is free if unset.",
        ),
    ] = None
