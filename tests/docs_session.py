"""The Python that runs a page's blocks, one after the other, as a reader's shell would.

Run as a script: takes one JSON object with `page`, `line` and `code` per line of stdin, and answers
each with one line of JSON: null, or the text of what went wrong. What blocks print goes to stderr.
"""

import ast
import json
import os
import re
import sys
import traceback
from typing import Any

#: Behind an expression: the value it must have, as `repr` writes it. `...` stands for anything.
VALUE = re.compile(r"#\s*->\s*(.+?)\s*$")

#: Behind a statement: the exception it must raise, with or without its text.
RAISES = re.compile(r"#\s*raises\s+(.+?)\s*$")


class Mismatch(Exception):
    """A block ran, but not as its comments say."""


def run_block(code: str, page: str, line: int, namespace: dict[str, Any]) -> None:
    """Runs a block and checks what its comments promise.

    Raises:
        Mismatch: A promise is not kept.
    """
    tree = ast.parse(code, page)
    comments = code.splitlines()
    for statement in tree.body:
        comment = comments[(statement.end_lineno or 1) - 1][statement.end_col_offset or 0 :]
        ast.increment_lineno(statement, line - 1)
        if found := RAISES.search(comment):
            expect_error(statement, page, namespace, found[1])
        elif (found := VALUE.search(comment)) and isinstance(statement, ast.Expr):
            expression = ast.Expression(statement.value)
            value = repr(eval(compile(expression, page, "eval"), namespace))
            check(value, found[1], f"{page}:{statement.lineno}")
        else:
            execute(statement, page, namespace)


def execute(statement: ast.stmt, page: str, namespace: dict[str, Any]) -> None:
    """Runs one statement."""
    exec(compile(ast.Module([statement], []), page, "exec"), namespace)  # noqa: S102 (the project's own pages)


def expect_error(statement: ast.stmt, page: str, namespace: dict[str, Any], expected: str) -> None:
    """Runs one statement that must raise."""
    place = f"{page}:{statement.lineno}"
    try:
        execute(statement, page, namespace)
    except Exception as error:  # noqa: BLE001 (any may be promised)
        name = type(error).__name__
        check(f"{name}: {error}" if ":" in expected else name, expected, place)
    else:
        raise Mismatch(f"{place}: raises nothing; the page says {expected}")


def check(found: str, expected: str, place: str) -> None:
    """Compares, with `...` in what is expected for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    if not re.fullmatch(pattern, found, re.DOTALL):
        raise Mismatch(f"{place}: {found}; the page says {expected}")


def main() -> None:
    """Answers until stdin ends."""
    sys.path[0] = os.getcwd()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for request in sys.stdin:
        asked = json.loads(request)
        problem = None
        try:
            run_block(asked["code"], asked["page"], asked["line"], namespace)
        except Mismatch as error:
            problem = str(error)
        except BaseException:  # noqa: BLE001 (sys.exit, too, is an answer)
            problem = traceback.format_exc()
        print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    main()
