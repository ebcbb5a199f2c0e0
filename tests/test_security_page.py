"""docs/security.md is true: each promise names tests, and these tests exist."""

import pytest

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
