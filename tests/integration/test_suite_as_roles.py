"""The suite over TLS, each role its own user: a handful of its modules, as `make test-acl` does."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from redis.exceptions import NoPermissionError

from conftest import StartWorker
from support.harness import TESTS
from support.patience import patient
from support.redis_places import with_database
from support.roles import CHOICE, as_role, has_roles, probing, take_refusals

#: Besides this one: results, errors and limits of a batch; Celery's canvas, retries and revokes.
MODULES = ("test_contract.py", "test_celery_features.py")


@pytest.mark.skipif(has_roles(), reason="this session does it itself")
@pytest.mark.timeout(300)
def test_what_tells_most_runs_with_the_users_of_acl() -> None:
    here = Path(__file__)
    files = [str(here), *(str(here.with_name(name)) for name in MODULES)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=TESTS.parent,
        env={**os.environ, CHOICE: "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(280),
    )
    if "no users over TLS" in done.stdout:
        pytest.skip("the server knows no users over TLS")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not has_roles(), reason="this session has no users")
def test_each_process_is_its_own_user_over_tls_and_what_is_refused_is_noticed(
    start_worker: StartWorker, redis_url: str, client: Celery
) -> None:
    start_worker("apps.shop")
    assert client.send_task("apps.shop.shout", ["a"]).get(timeout=patient(60)) == "A"
    with probing(redis_url) as admin:
        # One that has said nothing yet is nobody.
        users = {each["user"] for each in admin.client_list() if each["cmd"] != "NULL"}
        assert users == {"tests-worker", "tests-producer", "tests-admin"}
        assert admin.config_get("port")["port"] == "0"
        # Nor does anybody get in without a user.
        with pytest.raises(Exception, match=r"(?i)auth|not permitted|WRONGPASS"):
            Redis.from_url(re.sub(r"//.*@", "//", redis_url)).ping()
    with Redis.from_url(as_role(redis_url, "monitor")) as monitor, pytest.raises(NoPermissionError):
        monitor.lpush("celery", "a message")
    assert take_refusals(redis_url) == {("tests-monitor", "celery", "toplevel")}


def test_urls_of_other_servers_stay_as_they_are() -> None:
    url: Any = "redis://:secret@127.0.0.1:7/0"
    assert as_role(url, "worker") == url
    assert with_database(url, 3) == "redis://:secret@127.0.0.1:7/3"
