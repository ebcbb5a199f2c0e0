"""The settings of pictures and sound: the table `[media]`."""

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

#: Kinds of model whose items are pictures or sound, read beside their device.
IMAGE_KINDS = (
    "image_embedding",
    "image_classification",
    "zero_shot_image_classification",
    "object_detection",
)
AUDIO_KINDS = ("audio_classification", "audio_embedding", "transcription")
MEDIA_KINDS = (*IMAGE_KINDS, *AUDIO_KINDS)


class MediaSettings(BaseModel):
    """Where items of pictures and sound may come from, and how much of them is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    roots: list[str] = Field(
        [], description="Folders; items may be paths of files below them. None by default."
    )
    hosts: list[str] = Field(
        [],
        description="Hosts from which items are fetched: names, addresses or networks, and stores"
        " such as `s3://bucket`. None by default. A name that leads to a private address needs that"
        " address, too.",
    )
    max_bytes: PositiveInt = Field(50_000_000, description="Maximum bytes of an item.")
    timeout_s: PositiveFloat = Field(
        60, description="How long it may take to fetch and decode an item."
    )
    max_pixels: PositiveInt = Field(64_000_000, description="Maximum pixels of a picture.")
    max_audio_s: PositiveFloat = Field(14_400, description="Maximum seconds of a recording.")
    readers: PositiveInt | None = Field(
        None,
        le=64,
        description="Processes that decode, beside each device; 2 to 4 by the number of cores if"
        " unset.",
    )
