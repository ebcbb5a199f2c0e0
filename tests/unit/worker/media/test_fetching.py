"""What is fetched, from where, and within which limits."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchery import InvalidItem
from batchery.media_settings import MediaSettings
from batchery_worker.media.fetching import fetch
from batchery_worker.media.items import Content, Place
from support.picture_host import ZIP_BOMB, PictureHost

PICTURE = b"x" * 500


@pytest.fixture(scope="module")
def host() -> Iterator[PictureHost]:
    with PictureHost(PICTURE) as host:
        yield host


def get(content: Content, **media: Any) -> bytes | str:
    options = {"hosts": ["127.0.0.1"], "max_bytes": 1000, **media}
    return fetch(content, MediaSettings(**options), None)


def test_redirects_are_followed_to_hosts_that_are_allowed(host: PictureHost) -> None:
    assert get(Place("web", host.url("/redirect"))) == PICTURE


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/missing", "answered 404"),
        ("/loop", "more than 5 redirects"),
        ("/redirect-elsewhere", "host '127.0.0.2' is not allowed"),
        ("/redirect-file", "is no URL of a host"),
        ("/large", "more than media.max_bytes = 1000"),
        ("/endless", "more than media.max_bytes = 1000"),
    ],
)
def test_other_answers_are_refused(host: PictureHost, path: str, problem: str) -> None:
    with pytest.raises(InvalidItem, match=problem):
        get(Place("web", host.url(path)))


def test_what_a_host_has_packed_is_not_unpacked(host: PictureHost) -> None:
    assert get(Place("web", host.url("/zip-bomb"))) == ZIP_BOMB


def test_a_host_that_is_slow_is_left_in_time(host: PictureHost) -> None:
    with pytest.raises(InvalidItem, match=r"took more than media\.timeout_s = 0\.2"):
        get(Place("web", host.url("/slow?key=secret")), timeout_s=0.2)


def test_errors_do_not_repeat_what_may_be_a_key(host: PictureHost) -> None:
    with pytest.raises(InvalidItem) as error:
        get(Place("web", host.url("/missing?key=secret")))
    assert "secret" not in str(error.value)


def test_a_name_is_looked_up_once(host: PictureHost, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    look_up = socket.getaddrinfo

    def change(name: Any, *arguments: Any, **options: Any) -> Any:
        """Leads to the loopback address at first, and then elsewhere."""
        if name != "images.example.com":
            return look_up(name, *arguments, **options)
        asked.append(name)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.9"
        return look_up(address, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", change)
    hosts = ["images.example.com", "127.0.0.1"]
    url = host.url("/picture", host="images.example.com")
    assert get(Place("web", url), hosts=hosts) == PICTURE
    assert len(asked) == 1
    # The second time it leads to an address that nobody has named.
    with pytest.raises(InvalidItem, match=r"127\.0\.0\.9, which are not public"):
        get(Place("web", url), hosts=hosts)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0"),
        *("::", "::1", "fd00::1", "fe80::1%1", "fec0::1", "ff02::1"),
        # With one of IPv4 in them.
        *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b:1::127.0.0.1"),
        *("2002:7f00:1::", "2001:0:7f00:1::"),
    ],
)
def test_a_name_that_leads_to_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(InvalidItem, match="which are not public"):
        get(Place("web", "http://images.example.com/a"), hosts=["images.example.com"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes(PICTURE)
    (photos / "inside.png").symlink_to(photos / "a.png")
    (tmp_path / "b.png").write_bytes(PICTURE)
    (photos / "out.png").symlink_to(tmp_path / "b.png")
    (photos / "up").symlink_to(tmp_path)
    (photos / "round.png").symlink_to(photos / "round.png")
    (photos / "large.png").write_bytes(b"x" * 1001)
    (photos / "empty.png").write_bytes(b"")
    return photos


@pytest.mark.parametrize("path", ["a.png", "{}/a.png", "inside.png", "./a.png", "../photos/a.png"])
def test_files_below_a_root(photos: Path, path: str) -> None:
    roots = ["/nonexistent", str(photos)]
    assert get(Place("file", path.format(photos)), roots=roots) == PICTURE


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("b.png", "no such file below media.roots"),
        ("../b.png", "no such file below media.roots"),
        ("{}/../b.png", "no such file below media.roots"),
        ("out.png", "no such file below media.roots"),
        ("up/b.png", "no such file below media.roots"),
        ("round.png", "no such file below media.roots"),
        ("/dev/zero", "no such file below media.roots"),
        (".", "is no file"),
        ("large.png", "more than media.max_bytes = 1000"),
        ("empty.png", "is empty"),
    ],
)
def test_other_files_are_refused(photos: Path, path: str, problem: str) -> None:
    with pytest.raises(InvalidItem, match=problem):
        get(Place("file", path.format(photos)), roots=[str(photos)])


def test_without_roots_there_are_no_files(photos: Path) -> None:
    with pytest.raises(InvalidItem, match=r"see the setting media\.roots"):
        get(Place("file", str(photos / "a.png")))


def test_stores_are_read_by_fsspec(photos: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/a.png", "wb") as file:
        file.write(PICTURE)
    assert get(Place("store", "memory://bucket/a.png")) == PICTURE
    with pytest.raises(InvalidItem, match=r"b\.png"):
        get(Place("store", "memory://bucket/b.png"))
