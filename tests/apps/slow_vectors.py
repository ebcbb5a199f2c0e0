"""An app that answers to the name of an embedding model, slowly, and notes what it computes."""

import os
import time

from celery import Celery

from batchery import BatchTask, Failed, InvalidItem, install
from support.patience import patient

app = install(Celery("slow_vectors", set_as_current=False))
# A slow machine may hold up a worker that lives for as long as the default.
app.conf.broker_transport_options = {"lease_expiry_s": patient(5)}
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask, name=os.environ.get("NAME", "slow"), max_batch_size=16)
def slow(texts: list[str]) -> list[object]:
    """Vectors of two numbers; each text is noted in the file TRACE, each batch takes PAUSE_S."""
    with open(os.environ["TRACE"], "a") as file:
        file.write("".join(f"{text}\n" for text in texts))
    time.sleep(float(os.environ["PAUSE_S"]))
    return [_answer(text) for text in texts]


def _answer(text: str) -> object:
    if not text:
        return Failed(InvalidItem("text: is empty"))
    return {"tokens": len(text), "vector": [float(len(text)), 1.0]}
