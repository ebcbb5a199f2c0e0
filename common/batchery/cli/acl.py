"""`batchery acl`: prints a user of Redis's access lists for each role of a deployment."""

import os
import secrets
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.access import ROLES, KeySpace, write_user
from batchery.cli.app import REDIS_SCHEMES, app_options, load_app, url_errors
from batchery.cli.survey import app_queues
from batchery.errors import SettingsError, StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_queue_limits
from batchery.protocol.headers import backend_prefix
from batchery.settings import Settings

#: Bytes of randomness in a password.
PASSWORD_BYTES = 32

HELP = """Print users for Redis, each with the least that its role needs.

ROLE is one of those below; all of them by default. The lines are those of Redis's aclfile, for the
keys and queues of your app. Nothing is asked of Redis.

\b
producer        sends jobs and reads results: web servers, `batchery submit`
worker          `celery worker`; knows all queues, as it gives back what dead workers held
gateway         `batchery serve`, with the worker that it starts
gateway-worker  the workers of the gateway's jobs where it starts none
monitor         `batchery stats`, `explain`, `models`, `placement` and `exporter`
flower          Flower
operator        `batchery dead`, `doctor`, `drain` and `reload`, `celery purge`, and
                `batchery submit` where it goes on
"""


@click.command(help=HELP)
@click.argument("roles", nargs=-1, metavar="[ROLE]...", type=click.Choice(list(ROLES)))
@app_options
@click.option("-Q", "--queues", metavar="NAMES", help="Queues of all workers; default: the app's.")
@click.option(
    "--redis-version", type=click.Choice(["7", "6.2"]), default="7", help="6.2 knows coarser lists."
)
@click.option(
    "--passwords",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Passwords by user, one a line; those that are missing are made.",
)
@click.option("--prefix", default="batchery-", help="What names of users begin with.")
@click.option("--setuser", is_flag=True, help="Commands for redis-cli instead.")
def acl(
    *,
    roles: Sequence[str],
    app_path: str,
    redis_url: str | None,
    queues: str | None,
    redis_version: str,
    file: Path | None,
    prefix: str,
    setuser: bool,
) -> None:
    """Runs the command; see `HELP`."""
    if any(map(str.isspace, prefix)):
        raise click.UsageError("--prefix has white space, which no name of a user can have")
    app = load_app(app_path, redis_url, with_tasks=not queues)
    space = read_key_space(app, queues.split(",") if queues else None)
    names = {role: f"{prefix}{role}" for role in roles or ROLES}
    passwords = {} if file is None else keep_passwords(file, names.values())
    for role, name in names.items():
        has_selectors = redis_version != "6.2"
        line = write_user(name, role, space, passwords.get(name), has_selectors=has_selectors)
        click.echo(line.replace(f"user {name}", f"ACL SETUSER {name} reset") if setuser else line)


def read_key_space(app: Celery, queues: Collection[str] | None = None) -> KeySpace:
    """Where an app's data are in Redis, by its settings; connects to nothing.

    Args:
        app: The app.
        queues: All that its workers consume; None for those that it has, or sends its tasks to.

    Raises:
        SettingsError: Its broker is no Redis, or a setting is wrong.
    """
    with url_errors("broker_url"):
        connection = app.connection_for_write()
    url = connection.as_uri()
    if not url.startswith((*REDIS_SCHEMES, "sentinel://")):
        raise SettingsError(f"access lists are Redis's, but the broker is {url}")
    options: dict[str, Any] = app.conf.broker_transport_options
    fanout = options.get("fanout_prefix", True)
    pattern = fanout if isinstance(fanout, str) else "/{db}." if fanout else ""
    with url_errors("result_backend"):
        results = backend_prefix(app.backend) if isinstance(app.backend, RedisBackend) else b""
    expiring = {name for name, queue in app.amqp.queues.items() if _expires(queue)}
    return KeySpace(
        queues=sorted({*(queues or app_queues(app)), JOBS_QUEUE}),
        expiring=sorted(expiring),
        prefix=options.get("global_keyprefix", ""),
        result_prefix=results.decode(),
        separator=options.get("sep", KeySpace.separator),
        fanout=pattern.format(db=str(connection.virtual_host).strip("/") or 0),
        control=f"{app.conf.control_exchange}.pidbox",
        events=app.conf.event_exchange,
        has_direct=app.conf.worker_direct,
        reads_ages=get_queue_limits(app) is not None,
        sends_events=app.conf.task_send_sent_event,
        has_own_worker=Settings.load(app.conf).gateway.worker,
    )


def _expires(queue: Any) -> bool:
    return bool(queue.expires or "x-expires" in (queue.queue_arguments or {}))


def keep_passwords(file: Path, names: Collection[str]) -> dict[str, str]:
    """The passwords in a file, by user; those that are missing are made, and written to it.

    Only its owner may read the file that is written.

    Raises:
        StartError: The file cannot be read or written, or has a line of another form.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        known = dict(line.split() for line in lines if line.strip())
        missing = [name for name in names if name not in known]
        known |= {name: secrets.token_urlsafe(PASSWORD_BYTES) for name in missing}
        if missing:
            text = "".join(f"{name} {password}\n" for name, password in known.items())
            # Readable for the owner alone; complete as soon as it is there.
            descriptor, written = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as new:
                new.write(text)
            Path(written).replace(file)
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}") from None
    except ValueError:
        raise StartError(f"{file}: expected a name and a password on each line") from None
    return known
