"""Classes of jobs by their priority: the table `[classes]` of the settings."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

#: The lowest priority that Celery's Redis transport knows.
LOWEST_PRIORITY = 9


class PriorityClass(BaseModel):
    """Jobs of some of Celery's priorities, and their share of the devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: NonNegativeInt = Field(
        le=LOWEST_PRIORITY,
        description="First `priority` of the class, as Redis counts: 0 is the highest.",
    )
    share: PositiveFloat = Field(
        allow_inf_nan=False, description="Share of the devices' time; ratios count."
    )
    max_waiting: PositiveInt | None = Field(
        None, description="Maximum jobs of the class in a queue; with more, it is full."
    )
