import pytest

from batchery import DatasetError
from batchery_producer.files.records import SeenIds


def fill(seen: SeenIds) -> None:
    for number in range(10_000):
        seen.first_line(f"row-{number}", 0, number)


def test_full_disk_says_where_the_ids_are_kept() -> None:
    with SeenIds() as seen:
        seen._execute("PRAGMA max_page_count = 3")
        with pytest.raises(DatasetError, match=r"ids cannot be kept .* is full; .* SQLITE_TMPDIR"):
            fill(seen)
