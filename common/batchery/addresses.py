"""Where a program of ours may connect to for somebody else: hosts that are named, and no others.

A host's name is looked up once, and the connection goes to the address that was checked: a name
that leads elsewhere a moment later leads nobody astray.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

#: Where a network that has IPv6 alone finds the IPv4 address in the last 32 bits.
NAT64 = IPv6Network("64:ff9b::/96")

#: Networks that Python calls global though their addresses may lead to a private one: of IPv4 (two
#: old forms, local NAT64, Teredo, 6to4), or of a site.
HIDING_NETWORKS = (
    *("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48"),
    *("2001::/32", "2002::/16", "fec0::/10"),
)


class NotPublic(Exception):
    """A host has no address that may be connected to; the text names it and its addresses."""


def is_named(host: str, hosts: Sequence[str]) -> bool:
    """Whether a host is listed: by its name, or as an address by itself or its network.

    Args:
        host: Of a URL.
        hosts: Names, addresses and networks.
    """
    address = read_address(host)
    if address is None:
        return host in {each.lower() for each in hosts}
    return _is_listed(address, hosts)


def may_connect(address: str, hosts: Sequence[str]) -> bool:
    """Whether a host's address may be connected to: a public one, or one that is listed.

    Args:
        address: What the host's name was looked up to.
        hosts: As in `is_named`.
    """
    found = read_address(address)
    return found is not None and (_is_public(found) or _is_listed(found, hosts))


def read_address(text: str) -> IPv4Address | IPv6Address | None:
    """The address that a text is, as a system connects to it; None if it is none."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # A system connects to the IPv4 address that is inside.
    return getattr(found, "ipv4_mapped", None) or found


def _is_listed(address: IPv4Address | IPv6Address, networks: Iterable[str]) -> bool:
    """Whether an address, or a network that it is in, is listed; names are none."""
    for each in networks:
        with suppress(ValueError):
            if address in ip_network(each, strict=False):
                return True
    return False


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if address in NAT64:
        address = IPv4Address(int(address) % 2**32)
    is_hidden = _is_listed(address, HIDING_NETWORKS)
    return address.is_global and not address.is_multicast and not is_hidden


@asynccontextmanager
async def send_checked(
    client: Any,
    method: str,
    url: Any,
    hosts: Sequence[str],
    *,
    headers: Mapping[str, str],
    content: bytes | None = None,
    timeout_s: float,
) -> AsyncIterator[Any]:
    """Sends a request to an address of its host that was checked; follows no redirect.

    Args:
        client: An `httpx2.AsyncClient` without a proxy, which would connect to what it finds.
        method: `GET` or `POST`.
        url: An `httpx2.URL` of a host that is listed.
        hosts: As in `is_named`.
        headers: All but `Host`.
        content: The body.
        timeout_s: How long to wait for each part of an answer; the addresses of a host share as
            much for their connections.

    Yields:
        The answer, whose body was not read.

    Raises:
        NotPublic: The host has no address that may be connected to.
        OSError: The name cannot be looked up.
        httpx2.HTTPError: There is no answer.
    """
    import httpx2

    look_up = asyncio.get_running_loop().getaddrinfo
    found = await look_up(url.host, None, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    allowed = [each for each in addresses if may_connect(each, hosts)]
    if not allowed:
        there = ", ".join(addresses)
        raise NotPublic(f"{url.host} has the addresses {there}, which are not public")
    failed: Exception | None = None
    for address in allowed:
        request = client.build_request(
            method,
            url.copy_with(host=address),
            headers={**headers, "Host": url.netloc.decode()},
            content=content,
            timeout=httpx2.Timeout(timeout_s, connect=timeout_s / len(allowed)),
            extensions={"sni_hostname": url.host},
        )
        try:
            answer = await client.send(request, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            failed = error  # Somebody may listen at the next one.
            continue
        try:
            yield answer
        finally:
            await answer.aclose()
        return
    raise httpx2.ConnectError(f"{', '.join(allowed)}: {failed or 'no connection'}")
