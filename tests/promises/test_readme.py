"""The README is true: a reader who follows it from its top to its end gets what it shows."""

import os
from pathlib import Path

import pytest

from batchery.settings import PREFIX
from support.docs_page import follow
from support.harness import TESTS


def test_every_code_block_does_what_the_readme_says(
    tmp_path: Path, redis_url: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [each for each in os.environ if each.startswith(PREFIX)]:
        monkeypatch.delenv(variable)
    variables = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL")
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    follow(TESTS.parent / "README.md", tmp_path, environment | dict.fromkeys(variables, redis_url))
