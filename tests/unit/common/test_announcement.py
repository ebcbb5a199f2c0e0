"""What `batchery up` tells the commands in its folder."""

from pathlib import Path

import pytest

from batchery.announcement import FILE, Announcement, announce, find_announcement
from batchery.app import app
from batchery.cli.app import load_app

RUNNING = Announcement("redis://:secret@127.0.0.1:7000/0", "shop")


def test_what_is_announced_is_found_in_that_folder_until_it_ends(tmp_path: Path) -> None:
    with announce(RUNNING, tmp_path) as is_found:
        assert is_found
        assert find_announcement(tmp_path) == RUNNING
        assert find_announcement(tmp_path.parent) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_nobody_locks_was_left_by_one_that_was_killed(tmp_path: Path) -> None:
    with announce(RUNNING, tmp_path):
        left = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).touch(0o600)
    (tmp_path / FILE).write_bytes(left)
    assert find_announcement(tmp_path) is None
    with announce(RUNNING, tmp_path) as is_found:
        assert is_found
        assert find_announcement(tmp_path) == RUNNING


def test_a_second_one_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    with announce(RUNNING, tmp_path):
        with announce(Announcement("redis://other", "shop"), tmp_path) as is_found:
            assert not is_found
        assert find_announcement(tmp_path) == RUNNING


def test_a_file_that_others_may_read_is_not_trusted(tmp_path: Path) -> None:
    with announce(RUNNING, tmp_path):
        (tmp_path / FILE).chmod(0o640)
        assert find_announcement(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    with announce(RUNNING, tmp_path / "missing") as is_found:
        assert not is_found


@pytest.mark.parametrize("is_named", [False, True])
def test_the_app_of_the_settings_uses_it_unless_a_setting_names_a_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_named:
        monkeypatch.setenv("BATCHERY_REDIS_URL", "redis://mine:1/0")
    with announce(RUNNING):
        # A new app, as the module's has read its configuration in another test.
        fresh = type(app)("fresh", set_as_current=False)
        fresh.add_defaults(lambda: default_configuration())
        url = fresh.conf.broker_url
    assert url == ("redis://mine:1/0" if is_named else RUNNING.redis_url)


def default_configuration() -> dict[str, object]:
    """What the default app is configured with, read anew."""
    from batchery import app as module
    from batchery.installation import get_installation

    get_installation(app)._settings = None
    try:
        return module._config()
    finally:
        get_installation(app)._settings = None


@pytest.mark.parametrize(("path", "is_used"), [("apps.shop", True), ("apps.more", False)])
def test_a_command_uses_it_for_the_app_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_used: bool
) -> None:
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    monkeypatch.delenv("CELERY_RESULT_BACKEND", raising=False)
    monkeypatch.chdir(tmp_path)
    with announce(Announcement(RUNNING.redis_url, "apps.shop")):
        loaded = load_app(path)
    used = loaded.conf.broker_read_url
    try:
        assert (used == RUNNING.redis_url) is is_used
    finally:
        loaded.conf.update(broker_read_url=None, broker_write_url=None)
        loaded.backend_cls = None
