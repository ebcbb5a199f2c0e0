"""The README is true: a reader who follows it from its top to its end gets what it shows."""

from pathlib import Path

import pytest

from support.docs_page import follow
from support.harness import TESTS


@pytest.mark.usefixtures("no_settings")
def test_every_code_block_does_what_the_readme_says(
    tmp_path: Path, redis_url: str, hub: Path
) -> None:
    variables = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL")
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    follow(TESTS.parent / "README.md", tmp_path, environment | dict.fromkeys(variables, redis_url))
