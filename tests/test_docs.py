"""The documentation is true: code blocks work, tables name what there is.

The README is followed in `tests/promises`; `mkdocs --strict` checks links.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import flush
from support.docs_page import follow
from support.harness import TESTS
from support.own_cluster import OwnCluster

ROOT = TESTS.parent
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
EACH_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

#: What these pages do needs no Redis, they say. Variables would outrank what they set.
WITHOUT_REDIS = {"testing.md"}


@EACH_PAGE
@pytest.mark.usefixtures("no_settings")
def test_every_code_block_does_what_the_page_says(
    path: Path, tmp_path: Path, redis_url: str, hub: Path, request: pytest.FixtureRequest
) -> None:
    # What a page has sent last is still in the queue when its worker ends.
    flush(redis_url)
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    if path.name == "cluster.md":
        cluster: OwnCluster = request.getfixturevalue("cluster")
        environment |= {"CELERY_BROKER_URL": redis_url, "BATCHERY_REDIS_URL": cluster.url}
    elif path.name not in WITHOUT_REDIS:
        for variable in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL"):
            environment[variable] = redis_url
    follow(path, tmp_path, environment)


def test_the_page_of_settings_is_made_from_the_models() -> None:
    subprocess.run([sys.executable, ROOT / ".ci" / "settings_page.py", "--check"], check=True)
