"""What the check found, as JSON and as one page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Results of a step that are not shown on the page.
HIDDEN = {"rows", "note", "problem", "output", "status", "seconds", "hardware"}

#: Characters of a value on the page.
VALUE_CHARS = 400


def write(report: Mapping[str, Any], json_path: Path, page_path: Path) -> None:
    """Writes both."""
    json_path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    page_path.write_text(page(report))


def page(report: Mapping[str, Any]) -> str:
    """The report as Markdown: one line per step, then what each has found."""
    steps: Mapping[str, Mapping[str, Any]] = report["steps"]
    lines = [f"# GPU check, {report['device']}{' (dry run)' if report['dry'] else ''}", ""]
    lines += ["| Step | Status | s | Found |", "|---|---|---|---|"]
    for name, step in steps.items():
        found = " — ".join(filter(None, (step.get("problem"), step.get("note"))))
        lines.append(f"| {name} | {step['status']} | {step.get('seconds', '')} | {_cell(found)} |")
    for name, step in steps.items():
        lines += ["", f"## {name}", ""]
        for key, value in step.items():
            if key not in HIDDEN:
                lines.append(f"- {key}: {_cell(value)}")
        if step.get("rows"):
            lines += ["", *_table(step["rows"])]
        if step.get("output"):
            lines += ["", "```", *map(str, step["output"]), "```"]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    heads = list(dict.fromkeys(key for row in rows for key in row))
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(_cell(row.get(head, '')) for head in heads)} |" for row in rows),
    ]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}"
    return str(value)[:VALUE_CHARS].replace("|", "\\|").replace("\n", " ")
