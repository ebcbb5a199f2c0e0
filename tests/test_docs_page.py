"""The test of the documentation itself: it must not pass what a reader could not follow."""

from pathlib import Path

import pytest

from support.docs_commands import BadCommand, check_commands, read_commands, simple_commands
from support.docs_page import Reader, follow

#: A command that a reader could not run -> what the failure must say.
WRONG_COMMANDS = {
    "no-such-command": "no-such-command: no such command",
    "ls | no-such-command -x": "no-such-command: no such command",
    "batchery nothing": "no subcommand 'nothing'",
    "batchery submit a.txt --task t -o b --nothing": "--nothing",
    "batchery submit a.txt --task t": "Missing option '-o'",
    "batchery submit a --task t -o b --format xml": "'xml' is not one of",
    "celery -A nowhere worker": "celery -A nowhere: no such module",
    "celery -A batchery.app worker --nothing": "--nothing",
    "make nothing": "make nothing",
    "make test NOTHING=1": "no variable NOTHING",
    "pip install '.[nothing]'": "no extra ['nothing']",
    "pip install 'batchery[nothing]>=1'": "no extra ['nothing']",
    "python -m no_such_module": "no such module",
    "python nothing.py": "no such file",
}

#: A page that is wrong -> what the failure must say, and the line that it must name.
WRONG_PAGES = {
    "```\nx\n```": ("no such kind of block: ''", 1),
    "```cobol\nx\n```": ("no such kind of block: 'cobol'", 1),
    "\n```console sometimes\n$ ls\n```": ("no such kind of block: 'console sometimes'", 2),
    "```python\n1 +\n```": ("invalid syntax", 1),
    "```python\nx = 1\n```\n\n```python\n1 / 0\n```": ("division by zero", 5),
    "```python\n# one.py\nONE\n```": ("name 'ONE' is not defined", 1),
    "```python\nONE = 1\n```\n```text file=x\n```\n```python\nONE\n```": ("name 'ONE'", 6),
    "```pycon\n>>> 1 + 1\n3\n```": ("Expected:\n    3\nGot:\n    2", 2),
    "```json\n{'a': 1}\n```": ("Expecting property name", 1),
    "```jsonl\n{}\n{]\n```": ("Expecting property name", 1),
    "```yaml\n- [1\n```": ("while parsing", 1),
    "```toml\n# batchery.toml\nmax_size = 1\n```": ("no such setting", 1),
    "```toml\nmax_batch_size = 0\n```": ("max_batch_size = 0", 1),
    "```bash\nno-such-command\n```": ("no such command", 1),
    "```console\nls\n```": ("starts with '$ '", 1),
    "```console run\n$ false\n```": ("false: exit code 1", 1),
    "```console run\n$ echo two\none\n```": ("Got:\n    two", 1),
    "```console start\n$ false\n```": ("false: ended with 1", 1),
}

RIGHT_PAGE = """
1. In a list:

   ```console
   $ FLAG=1 make test TESTS=tests/unit && ls > /dev/null  # twice
   anything
   $ docker compose up
   ```

```python
# my_numbers.py
ONE = 1
```

```text file=data/two.txt
2
```

```python
from pathlib import Path

from my_numbers import ONE

two = int(Path("data/two.txt").read_text())
```

```pycon
>>> ONE + two
3
>>> [ONE] * 9
[1, ...]
>>> int("x")
Traceback (most recent call last):
    ...
ValueError: invalid ...
```

```console
$ celery -A my_numbers worker -Q a,b
$ python -m my_numbers
```

```console run
$ cat data/two.txt
2
$ python -c 'print("a", "b", "c")'
a ... c
```
"""


@pytest.fixture
def page(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page to be written, outside of the folder in which it is followed."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return tmp_path / "page.md"


@pytest.mark.parametrize("text", WRONG_COMMANDS)
def test_command_that_a_reader_could_not_run_is_refused(text: str) -> None:
    with pytest.raises(BadCommand) as caught:
        check_commands("bash", text)
    assert WRONG_COMMANDS[text] in str(caught.value)


@pytest.mark.parametrize("content", WRONG_PAGES)
def test_page_that_a_reader_could_not_follow_fails(page: Path, content: str) -> None:
    page.write_text(content)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any, as its message is checked)
        Reader().follow(page)
    message, line = WRONG_PAGES[content]
    assert message in str(caught.value)
    assert caught.value.__notes__ == [f"{page}:{line}"]


def test_page_that_is_right_passes(page: Path) -> None:
    page.write_text(RIGHT_PAGE)
    Reader().follow(page)


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit", "1 / 0"])
def test_page_whose_python_ends_early_fails(page: Path, code: str) -> None:
    page.write_text(f"```python\n{code}\n```\n")
    with pytest.raises(AssertionError, match="exit code"):
        follow(page, Path.cwd(), {})


def test_bash_block_is_cut_into_commands_where_the_shell_cuts_it() -> None:
    code = "# why\na 'x y' \\\n  --b=1\nX=1 c <in >out 2>&1 | d; e && f & # g\n"
    found = [simple_commands(text) for text, _ in read_commands("bash", code)]
    assert found[:2] == [[], [["a", "x y", "--b=1"]]]
    assert [words[0] for words in found[2]] == ["c", "d", "e", "f"]


def test_console_block_is_cut_into_commands_and_their_output() -> None:
    code = "$ a \\\n  b\n1\n2\n$ c\n"
    assert read_commands("console", code) == [("a b", "1\n2\n"), ("c", "")]
