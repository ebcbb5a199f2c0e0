"""`batchery health`: whether a worker is live, or ready, for probes that run a command."""

import http.client
from urllib.parse import urlsplit

import click

from batchery.errors import SettingsError

#: Where a worker serves its health by convention; it is off unless the settings switch it on.
DEFAULT_URL = "http://127.0.0.1:9464"

#: How long a worker may take to answer, in seconds.
TIMEOUT_S = 5.0


@click.command()
@click.option("--url", default=DEFAULT_URL, help="The worker's port of [metrics].")
@click.option("--ready", is_flag=True, help="Ask whether it is ready to take jobs.")
@click.pass_context
def health(context: click.Context, *, url: str, ready: bool) -> None:
    """Say whether a worker is live, by its port of `[metrics]`; the exporter's has one, too.

    \b
    Exit codes:
      0  it is
      1  it is not, or does not answer
      2  the URL is none
    """  # noqa: D301 (click looks for this character)
    status, text = ask(url, "/readyz" if ready else "/livez")
    click.echo(text, err=status != http.client.OK)
    context.exit(0 if status == http.client.OK else 1)


def ask(url: str, path: str) -> tuple[int, str]:
    """Asks a port.

    Returns:
        The status of the answer, 0 without one; and its text, or why there is none.

    Raises:
        SettingsError: The URL is none.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or http.client.HTTP_PORT
    except ValueError:
        host = None
    if not host or parts.scheme != "http":
        raise SettingsError(f"--url {url!r}: it is no URL of a worker; write it as {DEFAULT_URL}")
    # Not by urllib, which would ask a proxy of the environment.
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace").strip()
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        return 0, f"{url} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
