"""What a check is, and what it finds. Pure, but for the catalogue with the texts.

A check is a function from facts to symptoms. One that needs a fact which could not be gathered ends
with `FactUnknown`, and counts as not checked; so does one to which a fact makes no sense.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from batchery.doctor import thresholds
from batchery.doctor.facts import Facts, FactUnknown

#: Severity and texts of each check, by its id.
CATALOGUE = Path(__file__).with_name("catalogue.toml")


class Severity(IntEnum):
    """How bad a finding is; the value is the exit code."""

    #: It works, but slower, or less safely, than it could.
    WARNING = 1
    #: Jobs are lost, wait for ever, or are open to strangers.
    ERROR = 2


class Symptom:
    """What a check found, once."""

    def __init__(self, found: str, **values: object) -> None:
        """With the figure in the text; `values` are for the placeholders of the check's fix."""
        self.found = found
        self.values = values


#: A check: from facts to what is wrong.
Find = Callable[[Facts], Iterable[Symptom]]


def when(condition: object, found: str, **values: object) -> list[Symptom]:
    """One symptom if a condition holds, else none."""
    return [Symptom(found, **values)] if condition else []


class _Capitals(dict[str, object]):
    """Values of placeholders; one that is missing is its own name in capitals."""

    def __missing__(self, name: str) -> str:
        return name.upper()


@dataclass(frozen=True)
class CheckTexts:
    """What the catalogue says of a check.

    Attributes:
        severity: That of all its findings.
        finds: What it looks for, with placeholders for thresholds.
        why: Why that matters.
        fix: A line to copy, with placeholders: `app`, and values of the symptom.
    """

    severity: Severity
    finds: str
    why: str
    fix: str

    def describe(self) -> str:
        """What it looks for, with the thresholds."""
        return self.finds.format_map(vars(thresholds))

    def spell_fix(self, **values: object) -> str:
        """The fix with these values; where one is missing, its name in capitals."""
        return self.fix.format_map(_Capitals(values))


@cache
def read_catalogue() -> Mapping[str, CheckTexts]:
    """The texts of all checks, by id, errors first."""
    rows = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    found = {
        name: CheckTexts(Severity[row.pop("severity").upper()], **row) for name, row in rows.items()
    }
    return dict(sorted(found.items(), key=lambda each: -each[1].severity))


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do."""

    check: str
    severity: str
    found: str
    why: str
    fix: str


@dataclass
class Diagnosis:
    """What all checks found.

    Attributes:
        findings: Errors first, then in the order of the catalogue.
        unchecked: Why a check could not be made, by its id.
        passed: How many checks found nothing.
    """

    findings: list[Finding] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    passed: int = 0

    @property
    def exit_code(self) -> int:
        """0 for no finding, 1 for warnings, 2 for errors; what is unchecked does not count."""
        return max((Severity[each.severity.upper()] for each in self.findings), default=0)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "exit_code": int(self.exit_code)}


def diagnose(checks: Mapping[str, Find], facts: Facts) -> Diagnosis:
    """Makes all checks of the catalogue."""
    diagnosis = Diagnosis()
    for name, texts in read_catalogue().items():
        try:
            symptoms = list(checks[name](facts))
        except FactUnknown as unknown:
            diagnosis.unchecked[name] = str(unknown)
            continue
        except Exception as error:  # noqa: BLE001 (a setting, or a figure, may be of any type)
            diagnosis.unchecked[name] = f"{type(error).__name__}: {error}"
            continue
        diagnosis.passed += not symptoms
        for symptom in symptoms:
            fix = texts.spell_fix(**{"app": facts.app, **symptom.values})
            severity = texts.severity.name.lower()
            diagnosis.findings.append(Finding(name, severity, symptom.found, texts.why, fix))
    return diagnosis
