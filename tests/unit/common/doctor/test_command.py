"""What `batchery doctor` prints, and the page that lists its checks."""

import pytest

from batchery.cli.console import render
from batchery.doctor import checks_celery, checks_machine, checks_redis, checks_workers
from batchery.doctor.command import CHECKS, draw
from batchery.doctor.facts import FactUnknown
from batchery.doctor.findings import diagnose
from support.doctor_table import table
from support.harness import TESTS
from support.healthy_facts import make_facts

PAGE = (TESTS.parent / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "module",
    [checks_redis, checks_celery, checks_workers, checks_machine],
    ids=lambda module: str(module.__name__).rpartition(".")[2],
)
def test_the_page_lists_every_check_with_its_severity_and_fix(module: object) -> None:
    expected = table(module.CHECKS)  # type: ignore[attr-defined]
    assert expected in PAGE, f"replace the table in docs/doctor.md by this one:\n\n{expected}"


def test_findings_are_drawn_with_what_why_and_fix_and_then_what_is_unchecked() -> None:
    unknown = FactUnknown("Redis refuses it: NOPERM")
    facts = make_facts(redis_ahead_s=4.0, open_flower="http://10.0.0.3:5555", config=unknown)
    lines = [line.split() for line in render(draw(diagnose(CHECKS, facts)), 140).splitlines()]
    assert lines[0][:3] == ["error", "flower-open", "http://10.0.0.3:5555"]
    assert lines[3][:3] == ["warning", "redis-clock", "Redis's"]
    assert lines[5] == ["timedatectl", "set-ntp", "true"]
    assert lines[6:8] == [
        ["unchecked", "1", "check", "Redis", "refuses", "it:", "NOPERM"],
        ["redis-timeout"],
    ]
    passed = len(CHECKS) - 3
    assert " ".join(lines[-1]) == (
        f"{passed} checks found nothing wrong, 2 findings; 1 check could not be made"
    )


def test_where_nothing_is_found_there_is_one_line() -> None:
    text = render(draw(diagnose(CHECKS, make_facts())), 140)
    assert text.startswith(f"{len(CHECKS)} checks found nothing wrong, 0 findings; 0 checks")
