"""The settings of what a worker tells of itself: the table `[metrics]`."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


class MetricsSettings(BaseModel):
    """Where a worker serves its metrics and its health."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; there is no password."
    )
    port: NonNegativeInt | None = Field(
        None, le=65535, description="Port of `/metrics`, `/livez` and `/readyz`; 0 is any."
    )
