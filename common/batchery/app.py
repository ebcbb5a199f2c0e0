"""The standalone Celery app: models from settings alone, no code.

`celery -A batchery.app worker` serves every model of `batchery.toml` or the environment. Nothing is
read when this module is imported, only when Celery first asks for a setting.
"""

from typing import Any

import click
from celery import Celery

from batchery.errors import SettingsError
from batchery.installation import get_installation
from batchery.installer import install
from batchery.settings import Settings


class WrongSetting(click.ClickException):
    """What ends the `celery` command with one line: it shows the traceback of any other error."""

    exit_code = SettingsError.exit_code


def _read_settings() -> Settings:
    """The app's settings.

    Raises:
        WrongSetting: The same, where the command `celery` is what runs.
    """
    try:
        return get_installation(app).settings
    except SettingsError as error:
        context = click.get_current_context(silent=True)
        if context is not None and context.find_root().command.name == "celery":
            raise WrongSetting(str(error)) from None
        raise


def _config() -> dict[str, Any]:
    settings = _read_settings()
    url = settings.redis_url or "redis://localhost:6379/0"
    return {
        "broker_url": url,
        "result_backend": settings.result_url or url,
        "result_expires": settings.result_expires_s,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_track_started": False,
    }


app = Celery("batchery", set_as_current=False)
app.add_defaults(_config)
install(app)
