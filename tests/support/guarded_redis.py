"""A Redis with a user for each role, as `batchery acl` prints them, and with TLS if it can."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from redis import Redis

from batchery_worker.devstack.redis_server import free_port
from support.commands import run
from support.own_redis import OwnRedis
from support.redis_places import Certificate, make_certificate

#: What may be refused: what a server tells of itself, of which a role can do without, and a look
#: for queues, where no role can send to any but those that it knows.
TOLERATED = {"client|setinfo", "client", "scan"}


class GuardedRedis(NamedTuple):
    """A server, and the passwords of its users."""

    server: OwnRedis
    passwords: dict[str, str]

    def url(self, role: str) -> str:
        """The URL of a role."""
        name = f"batchery-{role}"
        return self.server.url.replace("://", f"://{name}:{self.passwords[name]}@")

    def client(self, role: str | None = None) -> Redis:
        """A client of a role; of the server's administrator without one."""
        return Redis.from_url(self.server.url if role is None else self.url(role))

    def refusals(self) -> set[tuple[str, str, str]]:
        """User, command and key or channel of whatever was refused."""
        with self.client() as client:
            log = client.acl_log(128)
        return {
            (entry["username"], entry["object"], entry["context"])
            for entry in log
            if entry["object"] not in TOLERATED
        }

    def forget_refusals(self) -> None:
        """Empties the log."""
        with self.client() as client:
            client.acl_log_reset()


def build_query(authority: Certificate, own: Certificate) -> str:
    """What a URL says of certificates: whom to trust, and who one is."""
    return (
        f"ssl_cert_reqs=required&ssl_ca_certs={authority.authority}"
        f"&ssl_certfile={own.authority}&ssl_keyfile={own.key}"
    )


def is_built_with_tls(binary: Path) -> bool:
    """Whether a server has TLS: then it stops because it has no certificate."""
    # Valkey knows the options even where it is built without TLS.
    command = [str(binary), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "tls-cert-file" in done.stdout


@contextlib.contextmanager
def tls_redis(directory: Path, binary: Path, **options: str) -> Iterator[OwnRedis]:
    """Starts one that only clients with its certificate may connect to."""
    if not is_built_with_tls(binary):
        pytest.skip(f"{binary.name} is built without TLS")
    certificate = make_certificate(directory)
    files = {
        "tls_ca_cert_file": certificate.authority,
        "tls_cert_file": certificate.authority,
        "tls_key_file": certificate.key,
    }
    options |= {name: str(path) for name, path in files.items()}
    port = free_port()
    options |= {"port": "0", "tls_port": str(port), "tls_auth_clients": "yes"}
    server = OwnRedis(directory / "redis", binary, **options)
    server.port = port
    server.url = f"rediss://127.0.0.1:{port}/0?{build_query(certificate, certificate)}"
    with server:
        yield server


@contextlib.contextmanager
def guarded_redis(
    directory: Path, binary: Path, app: str, *, version: str, tls: bool = False
) -> Iterator[GuardedRedis]:
    """Starts one whose users are those of an app; its `default` may do anything.

    Args:
        directory: For its files.
        binary: The server.
        app: As for `-A`.
        version: As for `--redis-version`.
        tls: Whether only clients with its certificate may connect.
    """
    kept = directory / "passwords"
    command = ["acl", "-A", app, "--redis-version", version, "--passwords", str(kept)]
    # The numbers of its databases are part of some names; the server need not be there yet.
    status, lines, error = run("redis://127.0.0.1:1/0", "batchery", *command)
    assert status == 0, error
    users = directory / "users.acl"
    users.write_text(f"user default on nopass ~* &* +@all\n{lines}")
    options = {"aclfile": str(users), "appendonly": "no"}
    made = (
        tls_redis(directory, binary, **options)
        if tls
        else OwnRedis(directory / "redis", binary, **options)
    )
    passwords = dict(line.split() for line in kept.read_text().splitlines())
    with made as server:
        yield GuardedRedis(server, passwords)
