"""Where webhooks may go, and how they are posted."""

import pytest
from httpx2 import URL

from batchery.addresses import may_connect
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.webhooks import find_target

HOSTS = ["hooks.example.com", "127.0.0.1", "10.1.0.0/16", "fd00::/8", "fec0:1::/32"]


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://hooks.example.com/a/b?c=d#e", "https://hooks.example.com/a/b?c=d"),
        ("http://HOOKS.example.com:8080", "http://hooks.example.com:8080"),
        ("http://10.1.2.3/x", "http://10.1.2.3/x"),
    ],
)
def test_url_of_a_listed_host(url: str, target: str) -> None:
    assert find_target(url, HOSTS) == URL(target)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com",
        "ftp://hooks.example.com/",
        "file:///etc/passwd",
        "https://",
        "https://evil.example/",
        "https://hooks.example.com.evil.example/",
        "https://hooks.example.com@evil.example/",
        "https://user@hooks.example.com/",
        "https://user:secret@hooks.example.com/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/\r\nX: 1",
        "https://hooks.exam\tple.com/",
        "https://höoks.example.com/",
        "http://10.2.0.1/",
        "http://[::1]/",
        "http://[::ffff:10.2.0.1]/",
        "http://2130706433/",
        "http://[hooks.example.com]/",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(Problem, match="webhook: "):
        find_target(url, HOSTS)


def test_without_hosts_none_is_allowed() -> None:
    with pytest.raises(Problem, match="webhook_hosts"):
        find_target("https://hooks.example.com/", [])


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("10.1.255.255", True),
        ("10.2.0.0", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::ffff:192.168.0.1", False),
        ("::ffff:127.0.0.1", True),
        ("fe80::1%eth0", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d70e", True),
        ("64:ff9b:1::5db8:d70e", False),
        ("2002:a9fe:a9fe::1", False),
        ("2001:0:5db8:d70e::1", False),
        ("::ffff:0:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("fec0::1", False),
        ("fec0:1::1", True),
        ("fd00::1", True),
        ("name", False),
    ],
)
def test_private_address_must_be_listed(address: str, may: bool) -> None:
    assert may_connect(address, HOSTS) is may
