"""The lines that `batchery acl` prints; tests/integration/test_roles.py has what they allow."""

import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from batchery import SettingsError
from batchery.cli.acl import ROLES, acl, name_keys


def make_app(**conf: Any) -> Celery:
    url = "redis://h/7"
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_have_all_keys_or_a_category_with_commands_without_keys(role: str) -> None:
    keys = name_keys(make_app(), ["q"])
    words = {*" ".join(ROLES[role]).format(**keys).split()}
    assert not {"~*", "allkeys", "&*", "allchannels", "+@all"} & words
    # A command without a key needs no pattern: FLUSHALL, KEYS.
    assert not {"+@keyspace", "+@read", "+@write", "+@admin", "+@dangerous"} & words


def test_names_are_those_of_the_app() -> None:
    app = make_app(
        broker_transport_options={"global_keyprefix": "a:", "sep": ":"},
        result_backend_transport_options={"global_keyprefix": "b:"},
        control_exchange="boss",
    )
    keys = name_keys(app, ["odd*[q]"])
    assert r"~a:odd\*\[q] ~a:odd\*\[q]:*" in keys["waiting"]
    assert "~a:batchery.gateway" in keys["waiting"].split()
    assert keys["results"] == "~b:celery-task-meta-* &b:celery-task-meta-*"
    channels = "&a:/7.boss.pidbox &a:/7.celeryev/* &a:/7.celeryev/worker.*"
    assert keys["channels"] == channels


def test_a_priority_is_between_characters_that_cannot_be_printed() -> None:
    words = name_keys(make_app(), ["embed"])["waiting"].split()
    assert "~embed[^!-~][^!-~]*" in words
    # As Redis reads it: no other queue is meant.
    known = re.compile("embed[^!-~][^!-~].*")
    assert known.fullmatch("embed\x06\x163")
    assert not known.fullmatch("embed-v2")
    # No pattern may have white space.
    assert "~my[^!-~]queue" in name_keys(make_app(), ["my queue"])["waiting"].split()


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
    assert done.stdout.startswith("user batchery-producer on #SHA256-OF-batchery-producer ")


def test_what_is_no_redis_is_refused() -> None:
    with pytest.raises(SettingsError, match="amqp://"):
        name_keys(Celery("shop", broker="amqp://h", set_as_current=False), ["q"])
