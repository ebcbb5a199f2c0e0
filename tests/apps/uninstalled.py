"""An app whose author forgot `install(app)`."""

from celery import Celery

from batchery import BatchTask

app = Celery("uninstalled", set_as_current=False)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    """Also says how many texts came together."""
    return [f"{text.upper()} of {len(texts)}" for text in texts]
