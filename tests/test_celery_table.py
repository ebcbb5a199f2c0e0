"""docs/celery.md is true: a feature that works names tests, and these tests exist."""

import pytest

from support.harness import TESTS
from support.named_tests import check_named

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
    named = check_named(tests)
    if works == "yes":
        assert named
    else:
        assert works in ("not yet", "no")
        assert how
