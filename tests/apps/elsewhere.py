"""An app whose Redis may be behind a Sentinel: MASTER says which one it is."""

import os

from celery import Celery

from batchery import BatchTask, install

app = Celery("elsewhere", set_as_current=False)
app.conf.worker_hijack_root_logger = False
if master := os.environ.get("MASTER"):
    app.conf.broker_transport_options = {"master_name": master}
    app.conf.result_backend_transport_options = {"master_name": master}
install(app)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]
