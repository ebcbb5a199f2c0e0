"""What a port of metrics says, of a worker or of the exporter."""

import contextlib
import http.client
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.commands import start
from support.harness import kill_all, wait_for
from support.patience import patient

#: By name and the values of the labels.
Samples = dict[tuple[str, ...], float]


def ask_port(port: int, path: str, timeout_s: float = patient(30)) -> tuple[int, str]:
    """The status and the text of `/livez` or `/readyz`; the status is 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)


def scrape(port: int, timeout_s: float) -> str:
    """The text of `/metrics`."""
    status, text = ask_port(port, "/metrics", timeout_s)
    assert status == 200, text
    return text


def read_samples(text: str, without: str = "") -> Samples:
    """The values in such a text; a label may be left out of their keys."""
    families: Any = text_string_to_metric_families(text)
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != without)): sample.value
        for family in families
        for sample in family.samples
    }


class Exporter:
    """A running exporter, by default of the app `apps.shop`."""

    def __init__(self, redis_url: str, *arguments: str, app: str = "apps.shop") -> None:
        command = ("batchery", "exporter", "-A", app, "--port", "0", *arguments)
        process: Any = start(redis_url, *command)
        self.process = process
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line or process.stderr.read()
        self.port = int(found[1])

    def says(self, path: str) -> tuple[int, str]:
        return ask_port(self.port, path)

    def scrape(self) -> str:
        return scrape(self.port, patient(60))

    def samples(self) -> Samples:
        """By name and the values of the labels."""
        return read_samples(self.scrape())

    def known(self) -> Samples:
        """The same once it knows the queues: of a Redis that answers late, it knows nothing."""

        def told() -> Samples:
            found = self.samples()
            return found if found["batchery_broker_up",] else {}

        return wait_for(told, "Redis answers in time")

    def close(self) -> None:
        kill_all(self.process)
        self.process.communicate()
