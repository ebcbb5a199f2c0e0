from pathlib import Path

import pytest

from batchery import DatasetError
from batchery_producer.files.records import SeenIds


def fill(max_pages: int) -> None:
    with SeenIds() as seen:
        seen._base.execute(f"PRAGMA max_page_count = {max_pages}")
        for number in range(10_000):
            seen.first_line(f"row-{number}", 0, number)


def test_full_disk_names_the_folder_of_the_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    with pytest.raises(DatasetError, match=rf"kept in {tmp_path}: .* is full; make room there"):
        fill(max_pages=3)
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", "")
    with pytest.raises(DatasetError, match=r"^the ids cannot be kept in /var/tmp: "):
        fill(max_pages=1)
