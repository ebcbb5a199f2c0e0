"""An app that answers to the name of a model, and is held back by files."""

import os
import time

from celery import Celery

from batchery import BatchTask, Failed, InvalidItem, install

app = install(Celery("embedder", set_as_current=False))
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask, name="embed", max_batch_size=64)
def embed(texts: list[str]) -> list[object]:
    """Notes the items in the file TRACE; one that is a path waits for such a file."""
    with open(os.environ["TRACE"], "a") as file:
        file.write("".join(f"{text}\n" for text in texts))
    for text in texts:
        while text.startswith("/") and not os.path.exists(text):
            time.sleep(0.01)
    return [answer(text, len(texts)) for text in texts]


def answer(text: str, size: int) -> object:
    """What is asked for: an error, or the text in capitals and the size of its batch."""
    if text == "too long":
        return Failed(InvalidItem("3 tokens, at most 2"))
    if text == "out of luck":
        return Failed(LookupError("no such word"))
    return {"text": text.upper(), "batch": size}
