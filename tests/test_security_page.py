"""docs/security.md is true: each promise names tests, and these tests exist."""

import pytest

from batchery.protocol import headers
from batchery.transport import consume, dead_letters
from batchery_producer.files import rows
from batchery_producer.gateway import bodies, connection, guard
from batchery_producer.gateway.batches import store
from support.harness import TESTS
from support.named_tests import check_named

PAGE = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")
PROMISES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| Promise | Tests |")[2].partition("\n\n")[0].splitlines()[2:]
]


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0].replace("`", ""))
def test_a_promise_names_its_tests(row: list[str]) -> None:
    assert check_named(row[1])


#: Cap, as the page says it -> what holds it.
CAPS = {
    "128 MiB,": dead_letters.MAX_MESSAGE_BYTES == 128 << 20,
    "16 MiB, and one message": consume.MAX_FETCH_BYTES == 16 << 20,
    "| 10,000 |": headers.MAX_ITEMS == 10_000,
    "200 characters": headers.MAX_TENANT_CHARS == 200,
    "64 KiB": connection.MAX_HEAD_BYTES == 64 << 10,
    "300,000, counted": bodies.MAX_VALUES == 300_000,
    "100 fields": bodies.MAX_FIELDS == 100,
    "50,000;": store.MAX_REQUESTS == 50_000,
    "512 MiB in each process": guard.MAX_BUFFERED_BYTES == 512 << 20,
    "| 16 MiB |": rows.MAX_LINE_BYTES == 16 << 20,
}


@pytest.mark.parametrize("cap", CAPS)
def test_a_cap_is_as_the_page_says(cap: str) -> None:
    assert cap in PAGE.partition("## Caps")[2]
    assert CAPS[cap]
