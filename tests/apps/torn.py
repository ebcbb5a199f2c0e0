"""An app whose commits are torn apart, once, between the results and the ends of the leases."""

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from batchery_worker.commit.committer import LeaseBroker
from support.patience import patient

app = install(Celery("torn", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}

#: What happens at the next commit is written in this file, if there is one.
PLAN = Path(os.environ.get("TORN_PLAN", "no plan"))

ask_broker = LeaseBroker.ask


def ask_after_a_fault(self: LeaseBroker, script: str, *args: Any) -> Any:
    """Follows the plan when the results are stored."""
    if script == "end" and PLAN.exists():
        plan = PLAN.read_text()
        PLAN.unlink()
        if plan == "the worker is killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        self.client.client_kill_filter(_type="normal", skipme=False)
    return ask_broker(self, script, *args)


LeaseBroker.ask = ask_after_a_fault  # type: ignore[assignment,method-assign]


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def name_anew(items: list[int]) -> list[str]:
    """Answers something else each time that it runs; waits while there is a `.hold`."""
    while PLAN.with_suffix(".hold").exists():
        time.sleep(0.01)
    return [f"{item} {uuid.uuid4()}" for item in items]
