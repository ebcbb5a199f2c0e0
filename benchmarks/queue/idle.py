"""What waiting costs: one idle consumer of 1, 4 and 16 queues, on our transport and on kombu's.

How long after its publication a message is in the consumer's hands, and how many commands a second
Redis executes while there is none, those inside scripts counted.

    python -m benchmarks.queue.idle --json benchmarks/results/idle.json
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import kombu
from kombu.asynchronous import Hub, set_event_loop
from redis import Redis
from rich.console import Console
from rich.table import Table

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report

TRANSPORTS = {
    "batchery": "batchery.transport:Transport",
    "kombu": "kombu.transport.redis:Transport",
}
QUEUES = (1, 4, 16)

#: Longest pause between two messages, in seconds: each must find the consumer waiting again.
PAUSE_S = 0.02


def consume(url: str, transport: str, queues: Sequence[str], pipe: Pipe) -> None:
    """Says when each message came, on the clock that all processes of a machine share."""
    hub = Hub()
    set_event_loop(hub)
    connection: Any = kombu.Connection(url, transport=transport)
    channel = connection.channel()
    channel.basic_qos(0, 8, False)

    def on_message(message: Any) -> None:
        pipe.send(time.monotonic())
        message.ack()

    consumer = kombu.Consumer(channel, [kombu.Queue(q) for q in queues], on_message=on_message)
    consumer.consume()
    connection.register_with_event_loop(hub)
    pipe.send("ready")
    hub.run_forever()


def commands(client: "Redis") -> int:
    """How many commands Redis has executed."""
    info: Any = client.info("stats")
    return int(info["total_commands_processed"])


def measure(url: str, name: str, count: int, messages: int, idle_s: float) -> dict[str, Any]:
    """One row: a consumer of so many queues."""
    queues = [f"queue-{number}" for number in range(count)]
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    with Redis.from_url(url) as client:
        client.flushall()
        # It ends with this process, and where it ends before, `recv` says so.
        child = context.Process(
            target=consume, args=(url, TRANSPORTS[name], queues, far), daemon=True
        )
        child.start()
        far.close()
        near.recv()
        time.sleep(1.5)  # Until the first rounds are over.
        before = commands(client)
        time.sleep(idle_s)
        # The two INFO are ours.
        rate = (commands(client) - before - 1) / idle_s
        connection: Any = kombu.Connection(url, transport=TRANSPORTS["kombu"])
        producer = connection.Producer(serializer="json")
        waits_ms = []
        for _ in range(messages):
            time.sleep(random.uniform(PAUSE_S / 2, PAUSE_S))
            began_s = time.monotonic()
            producer.publish("job", routing_key=random.choice(queues), exchange="")
            waits_ms.append(1000 * (near.recv() - began_s))
        connection.close()
        child.kill()
        child.join()
    return {
        "transport": name,
        "queues": count,
        "p50_ms": round(statistics.median(waits_ms), 2),
        "p99_ms": round(statistics.quantiles(waits_ms, n=100)[98], 2),
        "redis_commands_per_s": round(rate, 1),
    }


def main() -> None:
    """Measures every row, prints a table, and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=500, help="per row")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds without messages, per row"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        info: Any = client.info("server")
        rows = [
            measure(server.url, name, count, options.messages, options.idle)
            for count in QUEUES
            for name in TRANSPORTS
        ]
    report = {"hardware": hardware(), "redis": info["redis_version"], "rows": rows}
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*[str(value) for value in row.values()])
    console = Console(highlight=False)
    console.print(report["hardware"])
    console.print(table)
    write_report(options.json, report)


if __name__ == "__main__":
    main()
