"""Users of `batchery acl` on the Redis of a test session, over TLS, for `make test-acl`.

A test has the URL of a producer, as it calls. What it starts gets the URL of its own role, and what
looks into Redis behind the back of all that of an administrator. Any other URL stays as it is, so
that tests are the same on a Redis without users.
"""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis

from batchery.access import ROLES, write_user
from batchery.cli.acl import read_key_space
from batchery.cli.app import DEFAULT_APP

#: Set for a session whose Redis has users.
CHOICE = "TEST_REDIS_ROLES"

PREFIX = "tests-"
ADMIN = f"{PREFIX}admin"

#: What may be refused: what a server tells of itself, of which a role can do without.
TOLERATED = {"client|setinfo", "client"}

#: The role of a command of Batchery or Celery; whoever is not named is a producer.
COMMAND_ROLES = {
    **dict.fromkeys(("stats", "explain", "models", "exporter", "health"), "monitor"),
    **dict.fromkeys(("dead", "doctor", "purge"), "operator"),
    **dict.fromkeys(("worker", "beat"), "worker"),
    "flower": "flower",
    "serve": "gateway",
}

#: Queues of no app, which tests name when they send a job.
QUEUES = (
    *("aside", "nobody", "later", "there", "embed", "chat", "loud", "any", "next", "extra"),
    *("limited", "unlimited", "included", "pickled", "faults", "shop", "other", "bodies", "full"),
    *("devices", "elsewhere", "countdown", "apart", "speller", "doubles", "files", "traced"),
    *("unserved",),
)

#: What the tests' apps keep in Redis for themselves, as tasks of users may.
OWN_KEYS = "(~trace ~listened:* ~executed ~gate ~at-gate ~prepared ~seen-* +@all -@dangerous)"

TESTS = str(Path(__file__).resolve().parents[1])

#: Of a line of Redis's `aclfile`.
_WORDS = re.compile(r"\([^)]*\)|\S+")

#: Brackets that users have, by the URL of an administrator.
_known: dict[str, set[tuple[str, str]]] = {}

_LOGIN = re.compile(rf"//{PREFIX}[a-z]+:[a-z]+@")


def has_roles() -> bool:
    """Whether the session's Redis has users."""
    return bool(os.environ.get(CHOICE))


def as_role(url: str, role: str) -> str:
    """The URL of a role, where it is that of a producer."""
    return url.replace(_write_login("producer"), _write_login(role))


def as_admin(url: str) -> str:
    """The URL of the administrator, where it is that of a role."""
    return _LOGIN.sub(_write_login("admin"), url)


def as_command(url: str, command: Sequence[str]) -> tuple[str, list[str]]:
    """The URL of the role that runs a command, and the command with it; its app is granted."""
    usual = "monitor" if command[0] == "celery" and "batchery" in command else "producer"
    role = next((COMMAND_ROLES[word] for word in command if word in COMMAND_ROLES), usual)
    grant(url, command, {})
    return as_role(url, role), [as_role(word, role) for word in command]


def connect_as(app: Celery, role: str) -> Any:
    """A connection to an app's broker, as a role."""
    return app.connection_for_read(as_role(str(app.conf.broker_url), role))


@contextlib.contextmanager
def acting_as(app: Celery, role: str) -> Iterator[None]:
    """Runs a block, such as a command within this process, as a role."""
    before = str(app.conf.broker_url)
    app.conf.broker_url = as_role(before, role)
    yield
    app.conf.broker_url = before


@contextlib.contextmanager
def probing(url: str, **options: Any) -> Iterator[Any]:
    """A client that may do anything, whoever's URL it is."""
    if as_admin(url) != url and not options:
        yield _connect_admin(as_admin(url))
        return
    with Redis.from_url(as_admin(url), **options) as client:
        yield client


def grant(url: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Gives the users what an app needs besides.

    Args:
        url: Of the Redis.
        arguments: Of a command, which name the app and its queues.
        environment: What the command has in its environment besides.
    """
    if as_admin(url) == url:
        return
    found = dict(itertools.pairwise(arguments))
    options = [found.get("-A", DEFAULT_APP), *(("-Q", found["-Q"]) if "-Q" in found else ())]
    _set_users(url, _print_users(url, tuple(options), tuple(sorted(environment.items()))))


def login(url: str) -> str:
    """The URL of a producer on a Redis without users, which gets them."""
    with Redis.from_url(url) as client:
        client.acl_setuser(ADMIN, enabled=True, passwords=["+admin"], categories=["+@all"])
        client.execute_command("ACL", "SETUSER", ADMIN, "~*", "&*")
    url = url.replace("//", _write_login("producer"), 1)
    reset_users(url)
    with probing(url) as client:
        client.execute_command("ACL", "SETUSER", "default", "off")
    return url


def reset_users(url: str) -> None:
    """Leaves the users what they need for jobs of any name, in the queues that tests name."""
    if as_admin(url) == url:
        return
    with Celery("client", broker=url, backend=url, set_as_current=False) as app:
        space = read_key_space(app, ["celery", *QUEUES])
    lines = [write_user(f"{PREFIX}{role}", role, space, role, has_selectors=True) for role in ROLES]
    _known.pop(as_admin(url), None)
    _set_users(url, [f"{line.replace(' on ', ' reset on ', 1)} {OWN_KEYS}" for line in lines])


def take_refusals(url: str) -> set[tuple[str, str, str]]:
    """User, command and key or channel of whatever was refused since the last time."""
    with probing(url) as client:
        log = client.acl_log(128)
        client.acl_log_reset()
    return {
        (entry["username"], entry["object"], entry["context"])
        for entry in log
        if entry["object"] not in TOLERATED and entry["reason"] != "auth"
    }


def _write_login(role: str) -> str:
    return f"//{PREFIX}{role}:{role}@"


@functools.cache
def _connect_admin(url: str) -> Redis:
    """One for all tests: TLS takes long to connect, and some tests look every 20 ms."""
    return Redis.from_url(url)


@functools.cache
def _print_users(url: str, options: Sequence[str], environment: Sequence[Any]) -> list[str]:
    """What `batchery acl` prints; nothing where there is no such app."""
    with tempfile.TemporaryDirectory() as folder:
        passwords = Path(folder, "passwords")
        passwords.write_text("".join(f"{PREFIX}{role} {role}\n" for role in ROLES))
        command = ["acl", "-A", *options, "--passwords", str(passwords), "--prefix", PREFIX]
        variables = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "batchery", *command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": TESTS, **variables, **dict(environment)},
        )
    return done.stdout.splitlines() if done.returncode == 0 else []


def _set_users(url: str, lines: Sequence[str]) -> None:
    """Adds to users; each bracket is given once, as Redis would keep it twice."""
    known = _known.setdefault(as_admin(url), set())
    with probing(url) as client:
        for line in lines:
            _, name, *words = _WORDS.findall(line)
            added = [
                word for word in words if (name, word) not in known and word != "resetchannels"
            ]
            known |= {(name, word) for word in words if word.startswith("(")}
            client.execute_command("ACL", "SETUSER", name, *added)
        client.acl_save()
