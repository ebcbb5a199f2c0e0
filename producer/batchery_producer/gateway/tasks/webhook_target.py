"""Where results may be posted to. Pure: names are looked up elsewhere."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

from batchery_producer.gateway.problems import Kind, Problem

#: Ports by scheme.
PORTS = {"http": 80, "https": 443}


class WebhookTarget(NamedTuple):
    """A URL that was checked.

    Attributes:
        scheme: `http` or `https`.
        host: Name or address, in lower case.
        port: Port.
        path: Path and query, with a slash at the beginning.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """What the header `Host` says."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"


def resolve_target(url: str, hosts: Sequence[str]) -> WebhookTarget:
    """The target of a URL.

    Args:
        url: What a caller gives.
        hosts: The setting `gateway.webhook_hosts`: names, addresses and networks.

    Raises:
        Problem: It is no URL of these hosts.
    """
    if not hosts:
        raise _refused("none is allowed; see the setting gateway.webhook_hosts")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise _refused("has characters that belong in no URL; write them as %XX")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused(f"is no URL: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise _refused("expected https://HOST/PATH or http://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise _refused("must not have a user or a password; the receiver checks our signature")
    if port == 0:
        raise _refused("has port 0")
    host = parts.hostname
    address = _address(host)
    is_listed = (
        host in {each.lower() for each in hosts} if address is None else is_inside(address, hosts)
    )
    if not is_listed:
        raise _refused(f"host {host!r:.100} is not allowed; see the setting gateway.webhook_hosts")
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return WebhookTarget(parts.scheme, host, port or PORTS[parts.scheme], path)


def may_connect(address: str, hosts: Sequence[str]) -> bool:
    """Whether a host's address may be connected to: a public one, or one that is listed.

    Args:
        address: What the host's name was looked up to.
        hosts: As in `resolve_target`.
    """
    found = _address(address)
    if found is None:
        return False
    return (found.is_global and not found.is_multicast) or is_inside(found, hosts)


def is_inside(address: IPv4Address | IPv6Address, hosts: Sequence[str]) -> bool:
    """Whether an address, or a network that it is in, is listed."""
    networks = [network for each in hosts if (network := _network(each)) is not None]
    return any(address.version == each.version and address in each for each in networks)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # A system connects to the IPv4 address that is inside.
    return getattr(found, "ipv4_mapped", None) or found


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _refused(why: str) -> Problem:
    return Problem(Kind.INVALID, f"webhook: {why}", param="webhook")
