"""Equal items when workers die, come back, or compute something else than before."""

from pathlib import Path

import pytest
from celery import Celery

from conftest import StartWorker
from support.cached_jobs import answers, computed, send
from support.harness import unsettled, wait_for


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "computed"
    path.touch()
    return path


def test_versions_of_a_task_share_no_cached_results(
    start_worker: StartWorker, client: Celery, log: Path, redis_url: str
) -> None:
    # Each is another process: what is finished is shared by all workers.
    for version, times in (("1", 1), ("2", 2), ("1", 2)):
        worker = start_worker("apps.cached", env={"VERSION": version})
        found = answers(send(client, "versioned", "a", "a", path=str(log)))
        assert found == [f"a {version}"] * 2
        assert computed(log) == {"a": times}
        wait_for(lambda: unsettled(redis_url) == 0, "all are acknowledged")
        worker.kill()
