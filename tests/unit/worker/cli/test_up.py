"""The lines of `batchery up`: what comes last stays last."""

import io

from rich.console import Console

from batchery_worker.cli.up import QUIET_S, LinePrinter, what_to_type


def screen(written: str) -> list[str]:
    """What a terminal shows; it knows the two sequences that are used."""
    rows = [""]
    for part in written.replace("\r", "").split("\x1b["):
        text = part
        if part[1:2] == "A":
            rows, text = rows[: -int(part[0])], part[2:]
            rows[-1] = ""
        elif part.startswith("J"):
            text = part[1:]
        for number, line in enumerate(text.split("\n")):
            if number:
                rows.append("")
            rows[-1] += line
    return rows


def test_pinned_lines_come_last_again_when_nothing_was_printed_for_a_moment() -> None:
    now_s = 0.0
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    printer = LinePrinter(console, lambda: now_s)
    printer.pin(["type this", "or that"])
    printer("worker", "one")
    assert screen(file.getvalue()) == ["worker  | one", ""]
    printer.show_pinned()
    assert screen(file.getvalue()) == ["worker  | one", ""]
    now_s = QUIET_S
    printer.show_pinned()
    printer.show_pinned()
    assert screen(file.getvalue()) == ["worker  | one", "type this", "or that", ""]
    printer("worker", "two")
    now_s = 2 * QUIET_S
    printer.show_pinned()
    assert screen(file.getvalue()) == [
        "worker  | one",
        "worker  | two",
        "type this",
        "or that",
        "",
    ]


def test_without_a_terminal_they_are_printed_once() -> None:
    file = io.StringIO()
    printer = LinePrinter(Console(file=file), lambda: 100.0)
    printer.pin(["type this"])
    printer("worker", "one")
    printer.show_pinned()
    assert file.getvalue() == "type this\nworker  | one\n"


def test_what_to_type_names_a_task_and_the_app() -> None:
    said = "\n".join(what_to_type("shop", ["shout", "whisper"], is_found=True))
    assert "in this folder" in said
    assert "batchery submit texts.txt --task shout -A shop -o results.jsonl" in said
    assert "exported above" in what_to_type("batchery.app", [], is_found=False)[0]
