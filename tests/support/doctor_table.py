"""The table of checks in docs/doctor.md, as the catalogue has it."""

from collections.abc import Iterable

from batchery.doctor.findings import read_catalogue


def table(checks: Iterable[str]) -> str:
    """The table of some checks, by their ids, in this order."""
    lines = ["| Check | Severity | Finds | Why it matters | Fix |", "|---|---|---|---|---|"]
    for name in checks:
        texts = read_catalogue()[name]
        cells = [f"`{name}`", texts.severity.name.lower(), texts.describe(), texts.why]
        lines.append(f"| {' | '.join([*cells, f'`{texts.spell_fix()}`'])} |")
    return "".join(f"{line}\n" for line in lines)
