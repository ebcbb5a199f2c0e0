"""`batchery purge`: deletes what waits in queues, wherever they are."""

from collections.abc import Sequence

import click
from celery import Celery

from batchery.cli.app import check_broker, with_app
from batchery.cli.console import broker_errors
from batchery.cli.survey import choose_places, open_places


@click.command()
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@with_app
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(*, queues: Sequence[str], app: Celery, yes: bool) -> None:
    """Delete the jobs that wait in queues, for good; those that a worker has go on.

    As `celery purge`, which knows no queues but those of Celery's broker.
    """
    check_broker(app)
    if not yes:
        click.confirm(f"Delete all jobs in {', '.join(queues)} for good?", abort=True)
    with broker_errors(), open_places(app) as places:
        for queue in queues:
            channels = [
                each.connection.default_channel for each in choose_places(app, places, queue)
            ]
            click.echo(f"{queue}: {sum(each.queue_purge(queue) for each in channels)}")
