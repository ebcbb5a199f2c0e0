"""A task that says itself where it goes."""

from apps.including import app
from batchery import BatchTask


@app.task(shared=False, base=BatchTask, queue="included")
def whisper(texts: list[str]) -> list[str]:
    return [text.lower() for text in texts]
