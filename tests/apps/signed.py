"""An app whose messages are signed: by the key in a folder, and by those whom another one names."""

import os
from pathlib import Path

from celery import Celery

from batchery import BatchTask, install

KEY = Path(os.environ.get("SIGNING_KEY", "."))
TRUSTED = os.environ.get("TRUSTED_CERTIFICATES", "")

app = Celery("signed", set_as_current=False)
app.conf.update(
    task_serializer="auth",
    accept_content=["auth"],
    result_accept_content=["json"],
    security_key=str(KEY / "key.pem"),
    security_certificate=str(KEY / "cert.pem"),
    security_cert_store=TRUSTED,
    worker_hijack_root_logger=False,
)
app.setup_security()
install(app)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number
