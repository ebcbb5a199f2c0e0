"""The command `celery`, whose worker serves all queues that its tasks go to; `up` runs it.

Celery's own worker serves the default queue, and with `install` those of models: whoever runs
several says what each one serves. `up` runs one, and what it left out nobody would serve.
"""

from typing import Any

from celery.__main__ import main
from celery.signals import celeryd_init

from batchery.cli.survey import app_queues


@celeryd_init.connect
def add_own_queues(instance: Any, **_: Any) -> None:
    """Has a worker serve the queues that calls of its tasks are sent to, before it prepares."""
    queues = instance.app.amqp.queues
    for name in sorted(app_queues(instance.app)):
        queues.select_add(queues[name])


if __name__ == "__main__":
    main()
