"""Users of `batchery acl` on the Redis of a test session, over TLS, for `make test-acl`.

A test has the URL of a producer, as it calls. What it starts gets the URL of its own role, and what
looks into Redis behind the back of all that of an administrator. Any other URL stays as it is, so
that tests are the same on a Redis without users.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis

from batchery.access import ROLES, KeySpace, write_user
from batchery.cli.acl import read_key_space
from batchery.cli.app import DEFAULT_APP

#: Set for a session whose Redis has users.
CHOICE = "TEST_REDIS_ROLES"

PREFIX = "tests-"
ADMIN = f"{PREFIX}admin"

#: What may be refused: what a server tells of itself, of which a role can do without, and a look
#: for queues, where no role can send to any but those that it knows.
TOLERATED = {"client|setinfo", "client", "scan"}

#: The role of a command of Batchery or Celery, or of its option; who is not named is a producer.
COMMAND_ROLES = {
    **dict.fromkeys(("stats", "explain", "models", "placement", "exporter", "health"), "monitor"),
    # A run that goes on reads the messages that wait, and those that workers hold.
    **dict.fromkeys(("dead", "doctor", "drain", "reload", "purge", "--resume"), "operator"),
    **dict.fromkeys(("worker", "beat"), "worker"),
    "flower": "flower",
    "serve": "gateway",
}

#: Queues of no app, which tests name when they send a job.
QUEUES = (
    *("aside", "nobody", "later", "there", "embed", "chat", "loud", "any", "next", "extra"),
    *("limited", "unlimited", "included", "pickled", "faults", "shop", "other", "bodies", "full"),
    *("devices", "elsewhere", "countdown", "apart", "speller", "doubles", "files", "traced"),
    *("unserved", "late", "slow", "first", "stock", "embde", "one", "two", "queue", "gone"),
)

#: What the tests' apps keep in Redis for themselves, as tasks of users may.
OWN_KEYS = (
    "(~trace ~listened:* ~traced:* ~executed ~gate ~at-gate ~prepared ~tracked"
    " ~celery-[0-9] ~alone-[0-9] +@all -@dangerous)"
)

TESTS = str(Path(__file__).resolve().parents[1])

#: Of a line of Redis's `aclfile`.
_WORDS = re.compile(r"\([^)]*\)|\S+")

#: What users have, by their server.
_spaces: dict[str, list[KeySpace]] = {}

_LOGIN = re.compile(rf"//{PREFIX}[a-z-]+:[a-z-]+@")


def has_roles() -> bool:
    """Whether the session's Redis has users."""
    return bool(os.environ.get(CHOICE))


def as_role(url: str, role: str) -> str:
    """The URL of a role, where it is that of a producer."""
    return url.replace(_write_login("producer"), _write_login(role))


def as_admin(url: str) -> str:
    """The URL of the administrator, where it is that of a role."""
    return _LOGIN.sub(_write_login("admin"), url)


def as_command(url: str, command: Sequence[str], cwd: Path | None = None) -> tuple[str, list[str]]:
    """The URL of the role that runs a command, and the command with it; its app is granted."""
    usual = "monitor" if command[0] == "celery" and "batchery" in command else "producer"
    role = next((COMMAND_ROLES[word] for word in command if word in COMMAND_ROLES), usual)
    grant(url, command, {}, cwd)
    return as_role(url, role), [as_role(word, role) for word in command]


def connect_as(app: Celery, role: str) -> Any:
    """A connection to an app's broker, as a role."""
    return app.connection_for_read(as_role(str(app.conf.broker_url), role))


@contextlib.contextmanager
def acting_as(app: Celery, role: str) -> Iterator[None]:
    """Runs a block, such as a command within this process, as a role."""
    before = str(app.conf.broker_url)
    app.conf.update(broker_url=as_role(before, role))
    try:
        yield
    finally:
        app.conf.update(broker_url=before)


@contextlib.contextmanager
def probing(url: str, **options: Any) -> Iterator[Any]:
    """A client that may do anything, whoever's URL it is."""
    if as_admin(url) != url and not options:
        yield _connect_admin(as_admin(url))
        return
    with Redis.from_url(as_admin(url), **options) as client:
        yield client


def grant(
    url: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
) -> None:
    """Gives the users what an app needs besides.

    Args:
        url: Of the Redis.
        arguments: Of a command, which name the app and its queues.
        environment: What the command has in its environment besides.
        cwd: Where it is run, and finds its settings.
    """
    if as_admin(url) == url:
        return
    found = dict(itertools.pairwise(arguments))
    app = found.get("-A", DEFAULT_APP)
    if space := _read_key_space(url, app, tuple(sorted(environment.items())), cwd):
        queues = [*space.queues, *found.get("-Q", "").split(",")]
        _add_space(url, replace(space, queues=[each for each in queues if each]))


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
    _spaces.pop(_identify(url), None)
    with Celery("client", broker=url, backend=url, set_as_current=False) as app:
        _add_space(url, read_key_space(app, ["celery", *QUEUES]))


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


#: Run where the app is imported: its key space as JSON.
_SHOW = """
import json, sys
from dataclasses import asdict
from batchery.cli.acl import read_key_space
from batchery.cli.app import load_app
print(json.dumps(asdict(read_key_space(load_app(sys.argv[1])))))
"""


@functools.cache
def _read_key_space(
    url: str, app: str, environment: Sequence[Any], cwd: Path | None
) -> KeySpace | None:
    """As `batchery acl` reads it, in a process of its own; None where there is no such app."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHOW, app],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": TESTS,
            "CELERY_BROKER_URL": url,
            "CELERY_RESULT_BACKEND": url,
            **dict(environment),
        },
    )
    return KeySpace(**json.loads(done.stdout)) if done.returncode == 0 else None


def _identify(url: str) -> str:
    """The server itself, which may be behind a proxy."""
    with probing(url) as client:
        return str(client.info("server")["run_id"])


def _add_space(url: str, space: KeySpace) -> None:
    """Writes the users anew; they have all queues of all apps, as one command may take several."""
    spaces = _spaces.setdefault(_identify(url), [])
    queues = {*space.queues, *(name for each in spaces for name in each.queues)}
    known = [replace(each, queues=sorted(queues)) for each in (*spaces, space)]
    known = [each for at, each in enumerate(known) if each not in known[:at]]
    if known == spaces:
        return  # Redis might cut subscriptions of users that are written anew.
    spaces[:] = known
    with probing(url) as client:
        for role in ROLES:
            words: dict[str, None] = {}
            for each in spaces:
                line = write_user(f"{PREFIX}{role}", role, each, role, has_selectors=True)
                words |= dict.fromkeys(_WORDS.findall(line)[2:])
            client.execute_command("ACL", "SETUSER", f"{PREFIX}{role}", "reset", *words, OWN_KEYS)
        client.acl_save()
