"""What an item is, and where it may come from."""

from typing import Any

import pytest

from batchery import InvalidItem
from batchery.media_settings import MediaSettings
from batchery_worker.media.items import (
    Content,
    Place,
    Text,
    parse_item,
)

HOSTS = ["images.example.com", "127.0.0.1", "10.1.0.0/16", "fd00::/8", "s3://photos"]

SETTINGS = MediaSettings(hosts=HOSTS, max_bytes=1000)

BOTH = ("image", "text")


@pytest.mark.parametrize(
    ("item", "content"),
    [
        (b"abc", b"abc"),
        ({"base64": "YWJj"}, b"abc"),
        ({"image": b"abc"}, b"abc"),
        ({"image": {"base64": "YWJj"}}, b"abc"),
        ("data:image/png;base64,YWJj", b"abc"),
        ("DATA:;base64,YWJj", b"abc"),
        ({"text": "a cat"}, Text("a cat")),
        ("a/b.png", Place("file", "a/b.png")),
        ({"image": "/a/b.png"}, Place("file", "/a/b.png")),
        ("batchery:aZ-9_", Place("payload", "aZ-9_")),
        ("https://images.example.com/a?b=c", Place("web", "https://images.example.com/a?b=c")),
        ("http://IMAGES.example.com:81/a", Place("web", "http://IMAGES.example.com:81/a")),
        ("http://10.1.2.3/a", Place("web", "http://10.1.2.3/a")),
        ("http://[fd00::1]/a", Place("web", "http://[fd00::1]/a")),
        ("s3://photos/a/b.png", Place("store", "s3://photos/a/b.png")),
    ],
)
def test_items(item: Any, content: Content) -> None:
    assert parse_item(item, BOTH, SETTINGS) == content


@pytest.mark.parametrize(
    "item",
    [
        None,
        7,
        [b"abc"],
        "",
        b"",
        {},
        {"image": b"a", "text": "b"},
        {"audio": b"abc"},
        {"text": ""},
        {"text": 7},
        {"image": None},
        {"image": {"image": b"abc"}},
        {"base64": "YWJ"},
        {"base64": "YW\nJj"},
        {"base64": 7},
        {"base64": "YWJj", "more": 1},
        "data:image/png,abc",
        "data:image/png;base64,*",
        "a\0b",
        "a\nb",
        "x" * 10_000,
        "batchery:",
        "batchery:a b",
        "batchery:../x",
        b"x" * 1001,
        {"base64": "eHh4" * 400},
        "data:;base64," + "eHh4" * 400,
    ],
)
def test_what_is_no_item_is_refused_on_one_line(item: Any) -> None:
    with pytest.raises(InvalidItem) as error:
        parse_item(item, BOTH, SETTINGS)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "https:///a",
        "https://evil.example/a",
        "https://images.example.com.evil.example/a",
        "https://images.example.com@evil.example/a",
        "https://user@images.example.com/a",
        "https://user:secret@images.example.com/a",
        "https://images.example.com:99999/a",
        "https://images.example.com\\@evil.example/a",
        "https://images.example.com/a b",
        "https://imäges.example.com/a",
        "http://127.0.0.2/a",
        "http://2130706433/a",
        "http://0x7f.1/a",
        "http://127.1/a",
        "http://localhost/a",
        "http://[::1]/a",
        "http://[::]/a",
        "http://[0:0:0:0:0:0:0:1]/a",
        "http://[::127.0.0.1]/a",
        "http://[64:ff9b::127.0.0.1]/a",
        "http://[::ffff:10.2.0.1]/a",
        "http://[fe80::1%25eth0]/a",
        "http://[images.example.com]/a",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "local:///etc/passwd",
        "memory://a",
        "ftp://images.example.com/a",
        "gopher://images.example.com/a",
        "s3://other/a",
        "s3://photos@other/a",
        "s3://photos.other/a",
        "simplecache::s3://photos/a",
        "zip://a.png::file:///etc/a.zip",
        "s3://photos/a.zip::file:///etc/passwd",
        "filecache::file:///etc/passwd",
        "github://photos/a",
    ],
)
def test_urls_of_other_hosts_are_refused(url: str) -> None:
    with pytest.raises(InvalidItem, match=r"allowed|URL|written as"):
        parse_item(url, BOTH, SETTINGS)


def test_by_default_nothing_is_fetched() -> None:
    with pytest.raises(InvalidItem, match=r"media\.hosts"):
        parse_item("https://images.example.com/a", BOTH, MediaSettings())


def test_an_ipv4_address_in_an_ipv6_one_counts_as_what_it_is() -> None:
    url = "http://[::ffff:10.1.2.3]/a"
    assert parse_item(url, BOTH, SETTINGS) == Place("web", url)
