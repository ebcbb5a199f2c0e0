"""Tasks whose batches differ in when they leave. Their functions never run: devices are fakes."""

from typing import Any

from celery import Celery

from batchery import BatchTask, install

app = install(
    Celery("batches", broker="memory://", backend="cache+memory://", set_as_current=False)
)


def on_the_device(items: list[Any]) -> list[Any]:
    raise AssertionError("a batch function ran in the worker")


def make(name: str, **options: Any) -> str:
    """Registers a task of four items; returns its name."""
    decorate: Any = app.task(
        base=BatchTask, shared=False, name=f"apps.batches.{name}", max_batch_size=4, **options
    )
    decorate(on_the_device)
    return f"apps.batches.{name}"


FOUR = make("four")
PATIENT = make("patient", max_wait_ms=250)
LIMITED = make("limited", time_limit=5)
CACHED = make("cached", cache="1")

#: Calls of the hooks of `HOOKED`: their names and what each was told.
heard: list[tuple[str, Any]] = []


def before_start(_: Any, task_id: str, args: Any, kwargs: Any) -> None:
    heard.append(("before_start", args[0]))
    if args[0] == "refuse":
        raise LookupError("refused")


def on_success(_: Any, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
    heard.append(("on_success", retval))
    if retval == "exit":
        raise SystemExit("a hook that ends the worker")


HOOKED = make("hooked", before_start=before_start, on_success=on_success)


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number


@app.task(shared=False, acks_late=True)
def late(number: int) -> int:
    if number < 0:
        raise ValueError("as told")
    return number
