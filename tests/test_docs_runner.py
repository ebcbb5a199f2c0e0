"""The test of the documentation itself: it must not pass what a reader could not follow."""

from pathlib import Path

import pytest

from docs_blocks import read_blocks, read_commands, simple_commands
from docs_runner import Page

#: A page that is wrong -> what the failure must say, with its line.
WRONG = {
    "```\nx\n```": "2: a block without a language",
    "text\n\n    x = 1\n": "3: an indented block",
    "```cobol\nx\n```": "2: unknown language 'cobol'",
    "<!-- test: sometimes -->\n```python\nx = 1\n```": "3: directive 'sometimes'",
    "<!-- test: run -->\n\nNo block.\n": "'test: run' does not stand before a code block",
    "```python\n1 +\n```": "SyntaxError",
    "```python\n\n1 / 0\n```": "line 3, in <module>",
    "```python\n1 + 1  # -> 3\n```": ":2: 2; the page says 3",
    "```python\nint('1')  # raises ValueError\n```": "raises nothing",
    "```python\nint('x')  # raises KeyError\n```": "ValueError; the page says KeyError",
    "```python\nimport os\nos._exit(0)\n```": "Python ended",
    "<!-- test: needs gpu -->\n```python\nfrom batchery import Nothing\n```": "has no Nothing",
    "```json\n{'a': 1}\n```": "2: Expecting property name",
    "```jsonl\n{}\n{]\n```": "2: Expecting property name",
    "```yaml\n- [1\n```": "2: while parsing",
    "```toml\nx = 1\n```": "which file is it?",
    "```toml\n# batchery.toml\nmax_size = 1\n```": "no such setting",
    "```toml\n# batchery.toml\nmax_batch_size = 0\n```": "max_batch_size = 0",
    "```bash\nno-such-command\n```": "no-such-command: no such command",
    "```bash\nls | no-such-command -x\n```": "no-such-command: no such command",
    "```bash\nbatchery nothing\n```": "no subcommand 'nothing'",
    "```bash\nbatchery submit a.txt --task t -o b --nothing\n```": "--nothing",
    "```bash\nbatchery submit a.txt --task t\n```": "-o is missing",
    "```bash\nbatchery submit a --task t -o b --format xml\n```": "'xml' is none of",
    "```bash\ncelery -A nowhere worker\n```": "no block '# nowhere.py'",
    "```bash\ncelery -A batchery.app worker --nothing\n```": "--nothing",
    "```bash\nmake nothing\n```": "make nothing",
    "```bash\nmake test NOTHING=1\n```": "no variable NOTHING",
    "```bash\npip install '.[nothing]'\n```": "no extra ['nothing']",
    "```bash\npip install 'batchery[nothing]>=1'\n```": "no extra ['nothing']",
    "```bash\npython -m no_such_module\n```": "no such module",
    "```bash\npython nothing.py\n```": "no such file",
    "```console\nls\n```": "starts with '$ '",
    "<!-- test: run -->\n```bash\nfalse\n```": "false: exit code 1",
    "<!-- test: run -->\n```console\n$ echo two\none\n```": "prints\ntwo",
    "<!-- test: start -->\n```bash\nsleep 1\n```": "'test: start' is for",
}

RIGHT = """
# A page

1. In a list:

   ```console
   $ FLAG=1 make test TESTS=tests/unit && ls > /dev/null  # twice
   anything
   $ batchery submit data.txt \\
     --task embed -o results.jsonl
   $ celery -A my_numbers worker -Q a,b
   $ python -m my_numbers
   ```

```python
# my_numbers.py
ONE = 1
```

<!-- test: file data/two.txt -->
```text
2
```

```python
from my_numbers import ONE

two = int(open("data/two.txt").read())
```

```python
ONE + two  # -> 3
[ONE] * 9  # -> [1, ...]
int("x")  # raises ValueError: invalid ...
print("not in the way of the answers")
```

<!-- test: run -->
```console
$ cat data/two.txt
2
$ python -c 'print("a", "b", "c")'
a ... c
```

<!-- test: needs docker -->
```bash
docker compose up
```

<!-- test: needs gpu -->
```python
from batchery import Model
from my_numbers import ONE

Model().load("cuda:0" + missing)
```
"""


def run_page(tmp_path: Path, content: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(content)
    folder = tmp_path / "folder"
    folder.mkdir()
    # Nothing here talks to Redis: the address of nobody.
    with Page(page, folder, "redis://127.0.0.1:1/0", {}) as opened:
        opened.run()


@pytest.mark.parametrize("content", WRONG)
def test_a_page_that_a_reader_could_not_follow_fails(tmp_path: Path, content: str) -> None:
    with pytest.raises(Exception, match=r"page\.md") as caught:
        run_page(tmp_path, content)
    assert WRONG[content] in str(caught.value)


def test_a_page_that_is_right_passes(tmp_path: Path) -> None:
    run_page(tmp_path, RIGHT)


def test_a_block_knows_its_line_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n- item\n\n  ```python\n  x = 1\n  ```\n")
    [block] = read_blocks(page)
    assert (block.line, block.code) == (6, "x = 1\n")


def test_commands_are_cut_where_the_shell_cuts_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\n# why\na 'x y' \\\n  --b=1\nX=1 c <in >out 2>&1 | d; e && f & # g\n```\n"
    )
    [first, second] = read_commands(read_blocks(page)[0])
    assert simple_commands(first.text) == [["a", "x y", "--b=1"]]
    assert [words[0] for words in simple_commands(second.text)] == ["c", "d", "e", "f"]
