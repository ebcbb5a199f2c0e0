"""Users of Redis: the lines that `batchery acl` prints, and the names that they have."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner
from kombu import Queue

from batchery import SettingsError, StartError, access
from batchery.access import ROLES, Grant, KeySpace, list_patterns, write_user
from batchery.cli.acl import acl, keep_passwords, read_key_space

SPACE = KeySpace(queues=["q"])
EXPIRES = {"x-expires": 9000}


def test_a_user_has_a_hash_and_a_selector_for_each_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    grants = [Grant("+get", "letters cache"), Grant("+info"), Grant("+publish", channels="control")]
    monkeypatch.setattr(access, "ROLES", {"r": grants})
    line = write_user("u", "r", SPACE, "secret", has_selectors=True)
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    assert line.startswith(f"user u on #{digest} resetchannels +@connection ")
    selectors = "(~batchery:dead ~batchery:cache* +get) (&/0.celery.pidbox +publish)"
    assert line.endswith(f" +info {selectors}")
    assert write_user("u", "r", SPACE, None, has_selectors=True).split()[3] == "#SHA256-OF-u"


def test_for_redis_6_what_is_taken_away_comes_behind_all_categories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grants = [Grant("+@set -@dangerous", "letters"), Grant("+@list +config|get", "messages")]
    monkeypatch.setattr(access, "ROLES", {"r": grants})
    words = write_user("u", "r", SPACE, "secret", has_selectors=False).split()
    assert words.index("+@set") < words.index("+@list") < words.index("-@dangerous")
    assert words.index("-@dangerous") < words.index("+config|get")
    assert [word for word in words if word[0] == "~"] == [
        "~batchery:dead",
        "~batchery:dead-messages",
    ]
    assert not any("(" in word for word in words)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("has_selectors", [True, False])
def test_no_role_may_have_all_keys_or_a_category_with_commands_without_keys(
    role: str, has_selectors: bool
) -> None:
    line = write_user("u", role, SPACE, "x", has_selectors=has_selectors)
    assert not {"~*", "allkeys", "&*", "allchannels", "+@all"} & {*line.split()}
    # A command without a key needs no pattern: FLUSHALL, KEYS.
    assert not {"+@keyspace", "+@read", "+@write", "+@admin", "+@dangerous"} & {*line.split()}


@pytest.mark.parametrize("has_own_worker", [True, False])
def test_a_gateway_has_the_rights_of_a_worker_only_if_it_starts_one(has_own_worker: bool) -> None:
    space = KeySpace(queues=["q"], has_own_worker=has_own_worker)
    line = write_user("u", "gateway", space, "x", has_selectors=False)
    assert ("~batchery:token" in line, "~batchery:rate:*" in line) == (True, has_own_worker)


@pytest.mark.parametrize("has_selectors", [True, False])
def test_only_a_worker_is_told_of_changes_to_keys(has_selectors: bool) -> None:
    space = KeySpace(queues=["q"], has_own_worker=False)
    lines = {role: write_user("u", role, space, "x", has_selectors=has_selectors) for role in ROLES}
    told = {role for role, line in lines.items() if "+client|tracking" in line.split()}
    assert told == {"worker", "gateway-worker"}
    # Redis 6.2 knows nothing of what is taken away from CLIENT, and has only what it is given.
    assert {"-client|tracking" in line for line in lines.values()} == {has_selectors}


def test_a_producer_lets_a_queue_expire_only_where_the_app_does() -> None:
    app = Celery("shop", broker="redis://h/7", set_as_current=False)
    app.conf.task_queues = [Queue("a"), Queue("b", expires=9), Queue("c", queue_arguments=EXPIRES)]
    space = read_key_space(app)
    line = write_user("u", "producer", space, "x", has_selectors=True)
    alone = re.compile(r"\(([^)+]*) \+pexpire\)")
    [keys] = alone.findall(line)
    assert [each for each in keys.split() if "[" not in each] == ["~b", "~c"]
    assert not alone.findall(write_user("u", "producer", SPACE, "x", has_selectors=True))


def test_names_are_those_of_the_app() -> None:
    app = Celery("shop", broker="redis://h/7", backend="redis://h/7", set_as_current=False)
    app.conf.update(
        broker_transport_options={"global_keyprefix": "a:", "sep": ":"},
        result_backend_transport_options={"global_keyprefix": "b:"},
        control_exchange="boss",
        task_send_sent_event=True,
    )
    space = read_key_space(app, ["odd*[q]"])
    patterns = list_patterns(space)
    assert patterns["queues"][-2:] == [r"a:odd\*\[q]", r"a:odd\*\[q]:[0-9]"]
    assert patterns["results"] == ["b:celery-task-meta-*"]
    line = write_user("u", "producer", space, "x", has_selectors=True)
    assert "(&a:/7.boss.pidbox +publish)" in line
    assert "(&a:/7.celeryev/* +publish)" in line
    assert "~a:batchery:publisher:*" in line
    assert "batchery.gateway" in space.queues


def test_a_priority_is_between_characters_that_cannot_be_printed() -> None:
    pattern = list_patterns(KeySpace(queues=["embed"]))["queues"][1]
    assert pattern == "embed[^!-~][^!-~][0-9]"
    # As Redis reads it: no other queue is meant.
    known = re.compile(pattern)
    assert known.fullmatch("embed\x06\x163")
    assert not known.fullmatch("embed-v2")


def test_queues_of_single_workers_are_known_where_the_app_has_them() -> None:
    app = Celery("shop", broker="redis://h/7", set_as_current=False)
    assert "*.dq2" not in list_patterns(read_key_space(app, ["q"]))["queues"]
    app.conf.worker_direct = True
    assert "*.dq2" in list_patterns(read_key_space(app, ["q"]))["queues"]


def test_queues_are_those_of_modules_that_only_a_worker_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = "Celery('shop', broker='redis://h', include=['acl_tasks'], set_as_current=False)"
    routes = "app.conf.task_routes = {'acl_tasks.*': 'mails'}"
    (tmp_path / "acl_shop.py").write_text(f"from celery import Celery\napp = {app}\n{routes}\n")
    task = "@acl_shop.app.task\ndef mail(): ..."
    (tmp_path / "acl_tasks.py").write_text(f"import acl_shop\n{task}\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(acl, ["producer", "-A", "acl_shop"])
    assert (done.exit_code, "~mails" in done.stdout.split()) == (0, True), done.output


def test_a_queue_with_a_space_is_refused() -> None:
    space = KeySpace(queues=["my queue"])
    for has_selectors in (True, False):
        with pytest.raises(SettingsError, match="'my queue' has white space"):
            write_user("u", "producer", space, "x", has_selectors=has_selectors)


def test_a_user_with_a_space_is_refused_before_it_has_a_password(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    done = CliRunner().invoke(acl, ["--prefix", "my shop-", "--passwords", str(file)])
    assert (done.exit_code, file.exists()) == (2, False)
    assert "Error: --prefix has white space" in done.stderr


def test_a_broker_that_is_no_redis_is_refused() -> None:
    app: Any = Celery("shop", broker="amqp://h", set_as_current=False)
    with pytest.raises(SettingsError, match="access lists are Redis's, but the broker is amqp://"):
        read_key_space(app)


def test_passwords_are_made_once_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    first = keep_passwords(file, ["a"])
    assert len(first["a"]) > 40
    second = keep_passwords(file, ["a", "b"])
    assert second["a"] == first["a"] != second["b"]
    assert keep_passwords(file, ["b"]) == second
    assert file.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [file]


def test_what_a_run_that_was_killed_has_left_is_in_no_way(tmp_path: Path) -> None:
    # In containers, processes often have the same number.
    (tmp_path / f"passwords.{os.getpid()}").touch()
    assert "a" in keep_passwords(tmp_path / "passwords", ["a"])


def test_a_file_of_another_form_is_named(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("a\n")
    with pytest.raises(StartError, match="expected a name and a password on each line"):
        keep_passwords(file, ["a"])
    with pytest.raises(StartError, match="passwords/x: Not a directory"):
        keep_passwords(file / "x", ["a"])
