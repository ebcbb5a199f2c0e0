"""`python -m benchmarks.chaos`: torment a whole system, and count what was lost."""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from benchmarks.chaos.chaos import run
from benchmarks.chaos.plan import TRANSPORTS, Plan
from benchmarks.hardware import command, hardware

#: Field of the plan -> help. The option is called like the field.
HELP = {
    "jobs": "Jobs, submitted at an even rate.",
    "seed": "Another seed is another schedule.",
    "ordinary": "Ordinary jobs beside those of batches: 1 for as many as usual. Celery loses some.",
    "kills": "kill -9 of workers.",
    "device_kills": "kill -9 of device processes.",
    "child_kills": "kill -9 of processes of the prefork pool.",
    "redis_restarts": "kill -9 of redis-server, then its start on the same data.",
    "cuts": "All connections between workers and Redis cut.",
    "stops": "Workers stopped, and continued after --stop-s.",
    "malformed": "Messages that are none.",
    "fills": "Redis at maxmemory for --full-s, while workers start and end.",
    "failovers": "A replica promoted; the old primary turns read-only and cuts its connections.",
    "moves": "Shards of the cluster moved to another primary.",
    "broker_restarts": "kill -9 of RabbitMQ, then its start on the same data.",
    "workers": "Workers at the start.",
    "min_workers": "Fewest workers later, but where Redis is full.",
    "max_workers": "Most workers later.",
    "elders": "Workers that nothing kills: what they leak is seen.",
    "stop_s": "How long a worker is stopped.",
    "full_s": "How long Redis is full.",
    "rounds": "How often all of that comes, in another order each time.",
    "gap_s": "Mean time between two faults; jobs are spread over all of them.",
    "patience_s": "How long without any answer until the rest counts as stuck.",
    "load": "Part of what the workers can do that is submitted; --jobs follows from it.",
    "keep_s": "How long results and dead letters are kept; 0 for a day, and for ever.",
    "sample_s": "Time between two samples of memory, descriptors and keys; 0 for none.",
}


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds one option for each number in a plan, with its default."""
    for each in reversed(fields(Plan)):
        if each.name in HELP:
            kind: Any = click.IntRange(0) if each.type is int else click.FloatRange(0)
            spelling = f"--{each.name.replace('_', '-')}"
            option = click.option(
                spelling, type=kind, default=each.default, show_default=True, help=HELP[each.name]
            )
            command = option(command)
    return command


@click.command()
@plan_options
@click.option(
    "--transport", type=click.Choice(list(TRANSPORTS)), default="batchery", show_default=True
)
@click.option("--cluster", is_flag=True, help="Batch jobs and results are on a Redis Cluster.")
@click.option(
    "--rabbitmq", is_flag=True, help="The broker is a RabbitMQ, and batch jobs are on Redis."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=0,
    help="So many rounds that the run takes at least so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep logs, ledgers and Redis's data in this directory, a new one.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict alone.")
def chaos(*, as_json: bool, keep: Path | None, quiet: bool, minutes: float, **numbers: Any) -> None:
    """Submit jobs while workers, devices, Redis and connections are killed and cut.

    Exit code 1 if a job was lost, doubled, stuck or answered wrongly; with samples also if memory,
    descriptors or keys have grown.
    """
    plan = Plan(**numbers)
    if minutes:
        plan = plan.stretch(minutes)
    with tempfile.TemporaryDirectory(prefix="batchery-chaos-") as temporary:
        folder = Path(temporary)
        if keep is not None:
            try:
                keep.mkdir(parents=True)
            except OSError as error:
                raise click.UsageError(
                    f"--keep {keep}: {error.strerror}; name a new one"
                ) from error
            folder = keep.absolute()
        verdict = run(plan, folder, lambda line: None if quiet else click.echo(line, err=True))
    if as_json:
        origin = {"hardware": hardware(), "command": command("chaos")}
        everything = {**origin, "plan": asdict(plan), **verdict.info}
        # One line for each figure: a run has thousands of samples.
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in everything.items()]
        click.echo("{\n" + ",\n".join(lines) + "\n}")
    else:
        click.echo(verdict.text)
    sys.exit(0 if verdict.is_good else 1)


if __name__ == "__main__":
    chaos(prog_name="python -m benchmarks.chaos")
