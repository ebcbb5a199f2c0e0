"""The settings of what a worker tells of itself: the table `[metrics]`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class MetricsSettings(BaseModel):
    """Where a worker serves its metrics and its health."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[
        str,
        Field(min_length=1, description="Address to listen on; there is no password."),
    ] = "127.0.0.1"
    port: Annotated[
        int | None,
        Field(ge=0, le=65535, description="Port of `/metrics`, `/livez` and `/readyz`; 0 is any."),
    ] = None
