"""Batch tasks with `pydantic=True`, and an ordinary one that does the same."""

from collections.abc import Iterator, Sequence
from typing import Any

from celery import Celery
from pydantic import BaseModel, ValidationInfo, field_validator

from batchery import BatchTask, Failed, RetryAfter, install
from support.patience import patient

app = install(Celery("typed", set_as_current=False))
app.conf.worker_hijack_root_logger = False


class Order(BaseModel):
    """What callers send."""

    count: int
    name: str = "tea"

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str, info: ValidationInfo) -> str:
        """Refuses what the context of the task does not allow."""
        if info.context and name in info.context.get("refused", ()):
            raise ValueError(f"{name} is out of stock")
        return name


class Price(BaseModel):
    """What they get."""

    cents: int
    note: str | None = None


class Terms(BaseModel):
    """A keyword."""

    cents: int


OPTIONS: dict[str, Any] = {
    "shared": False,
    "pydantic": True,
    "pydantic_context": {"refused": ["gold"]},
    "pydantic_dump_kwargs": {"exclude_none": True},
}


@app.task(**OPTIONS)  # type: ignore[untyped-decorator]
def price_one(order: Order, *, terms: Terms | None = None) -> Price:
    return Price(cents=order.count * (terms.cents if terms else 100))


@app.task(base=BatchTask, max_batch_size=64, max_wait_ms=200, **OPTIONS)
def price(orders: list[Order], *, terms: Terms | None = None) -> list[Price]:
    return [Price(cents=each.count * (terms.cents if terms else 100)) for each in orders]


# So long that a worker that stands still for a moment makes one batch all the same.
@app.task(
    base=BatchTask,
    bind=True,
    max_retries=1,
    max_batch_size=64,
    max_wait_ms=patient(1500),
    **OPTIONS,
)
def mates(self: BatchTask, orders: Sequence[Order]) -> Iterator[Any]:
    """Says whose item each is, and with how many others."""
    for order, job in zip(orders, self.request.per_item, strict=True):
        if order.name == "retried" and not job.retries:
            yield RetryAfter(0)
        elif order.name == "failed":
            yield Failed("no such tea")
        else:
            yield {"id": job.id, "retries": job.retries, "mates": len(orders)}
