"""docs/celery.md is true: a feature that works names tests, and these tests exist."""

import re

import pytest

from support.harness import TESTS

LINES = (TESTS.parent / "docs" / "celery.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if line.startswith("| ") and not line.startswith(("| Feature ", "| --- "))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", ""))
def test_a_feature_that_works_names_its_tests_and_one_that_does_not_says_why(
    row: list[str],
) -> None:
    _, works, how, tests = row
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    for file, name in named:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text, f"{file} has no {name}"
    assert named if works == "yes" else how and works in ("not yet", "no")
