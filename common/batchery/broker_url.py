"""URLs of brokers and of clusters: whether one is any, and what it says."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis import connection as redis_connection

#: Schemes of URLs that name no broker.
NO_BROKER = ("http", "https", "ws", "wss", "tcp", "ftp", "file")

#: Schemes of URLs that name a cluster, and what its nodes speak.
SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}


def is_cluster(url: str | None) -> bool:
    """Whether a URL names a cluster."""
    return url is not None and urlsplit(url).scheme in SCHEMES


def find_database(url: object) -> object:
    """What a URL of one Redis names, however it is spelled; anything else as it is."""
    parts = urlsplit(str(url))
    if parts.scheme not in ("redis", "rediss") or "," in parts.netloc or ";" in str(url):
        return url
    host = {None: "localhost", "127.0.0.1": "localhost"}.get(parts.hostname, parts.hostname)
    return host, parts.port or 6379, parts.path.strip("/") or "0"


def read_cluster_url(url: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Reads `redis+cluster://user:password@host:port,host:port/?option=value`.

    Args:
        url: Its scheme is one of `SCHEMES`; options are those that redis-py reads from a URL.

    Returns:
        Host and port of the nodes that are asked first, and options of all connections.

    Raises:
        ValueError: It is none; the text says what is wrong with it.
    """
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    options: dict[str, Any] = {}
    nodes = []
    for host in hosts.split(","):
        netloc = f"{user}@{host}" if user else host
        parse_url: Any = redis_connection.parse_url
        options = dict(parse_url(urlunsplit((SCHEMES[parts.scheme], netloc, *parts[2:]))))
        nodes.append((options.pop("host", "localhost"), options.pop("port", 6379)))
    if options.pop("db", 0):
        raise ValueError("a cluster has no databases; leave the number away")
    return nodes, options


def check_broker_url(url: str) -> str:
    """Returns the URL of a broker, or several with semicolons between, as Celery takes them.

    Raises:
        ValueError: It is none.
    """
    if is_cluster(url):
        read_cluster_url(url)
        return url
    for part in url.split(";"):
        parts = urlsplit(part.strip())
        if not (parts.scheme and "://" in part) or parts.scheme in NO_BROKER:
            raise ValueError("it is no URL of a broker; write it as redis://localhost:6379/0")
        # A socket's path may hold anything; a port that is no number raises here.
        _ = parts.scheme.endswith(("unix", "socket")) or parts.port
    return url
