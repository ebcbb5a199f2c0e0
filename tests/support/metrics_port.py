"""What a port of metrics says, of a worker or of the exporter."""

import contextlib
import http.client
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

#: By name and the values of the labels.
Samples = dict[tuple[str, ...], float]


def scrape(port: int, timeout_s: float) -> str:
    """The text of `/metrics`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()


def read_samples(text: str, without: str = "") -> Samples:
    """The values in such a text; a label may be left out of their keys."""
    families: Any = text_string_to_metric_families(text)
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != without)): sample.value
        for family in families
        for sample in family.samples
    }
