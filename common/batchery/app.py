"""The standalone Celery app: models from settings alone, no code.

`celery -A batchery.app worker` serves every model of `batchery.toml` or the environment. Nothing is
read when this module is imported, only when Celery first asks for a setting.
"""

from typing import Any

from celery import Celery

from batchery.install import install, installation_of


def _config() -> dict[str, Any]:
    settings = installation_of(app).settings
    return {
        "broker_url": settings.redis_url,
        "result_backend": settings.result_url or settings.redis_url,
        "result_expires": settings.result_expires_s,
        "broker_connection_retry_on_startup": True,
        "task_track_started": False,
    }


app = Celery("batchery", set_as_current=False)
app.add_defaults(_config)
install(app)
