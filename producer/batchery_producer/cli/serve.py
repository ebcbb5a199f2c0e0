"""`batchery serve`: the HTTP gateway; `batchery key`: its API keys."""

import json
import re

import click

from batchery.cli.app import app_options
from batchery.errors import StartError

NOT_INSTALLED = "the gateway is not installed: pip install 'batchery[gateway]'"


@click.command()
@app_options
@click.option("--host", help="Address to listen on; by default that of the settings.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 is any free one.")
@click.option("--processes", type=click.IntRange(1, 64), help="Processes side by side.")
@click.option("--access-log", is_flag=True, help="Log each request.")
def serve(
    *,
    app_path: str,
    redis_url: str | None,
    host: str | None,
    port: int | None,
    processes: int | None,
    access_log: bool,
) -> None:
    """Serve the models of the settings over HTTP.

    It speaks OpenAI's API (embeddings, texts, files, batches), TEI's, Cohere's rerank, and its
    own; /openapi.json has all routes, and / is a page. Without API keys it listens on loopback
    alone: `batchery key NAME` makes one. The table [gateway] of the settings has the limits.

    \b
    Exit codes:
      0  stopped by a signal
      2  could not start: no such app, a wrong setting, or the address is taken
    """  # noqa: D301 (click looks for this character)
    try:
        from batchery_producer.gateway import server
    except ModuleNotFoundError as error:
        raise StartError(f"{NOT_INSTALLED} ({error})") from error
    server.serve(server.ServeOptions(app_path, redis_url, host, port, processes, access_log))


@click.command()
@click.argument("name")
def key(*, name: str) -> None:
    """Make an API key of the gateway, for the caller NAME.

    The key is shown once. The settings have only its hash, and a secret that signs its webhooks.
    """
    from batchery_producer.gateway.callers import make_key, make_webhook_secret

    made, hashed = make_key()
    # TOML's own rule; a dot in a name would make a table of its own.
    table = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    click.echo(f"Key, for {name} alone: {made}")
    click.echo(f'For batchery.toml:\n\n[gateway.keys.{table}]\nhash = "{hashed}"')
    click.echo(f'webhook_secret = "{make_webhook_secret()}"  # of its webhooks, if it has any')
