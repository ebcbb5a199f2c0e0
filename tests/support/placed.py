"""Which models are on which devices, as `batchery stats` says it."""

import json
from typing import Any

from celery import Celery
from click.testing import CliRunner

from batchery.cli.stats import stats


def list_placed(app: Celery, path: str, redis_url: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What is known of each model, by device and name, of all workers of an app."""
    app.conf.update(broker_url=redis_url, result_backend=redis_url)
    done = CliRunner().invoke(stats, ["-A", path, "--json"])
    workers = json.loads(done.stdout)["workers"].values()
    devices = [each for worker in workers for each in worker.get("devices", {}).items()]
    return {(device, name): model for device, at in devices for name, model in at["models"].items()}
