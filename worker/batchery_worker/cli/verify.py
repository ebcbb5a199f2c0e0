"""`batchery verify`: whether a model's batches give what single texts give."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TextIO

import click

from batchery.cli.app import DEFAULT_APP, load_app
from batchery.errors import SettingsError
from batchery.installation import get_installation
from batchery.settings import ModelSettings, Settings
from batchery_worker.device_pool.startup import choose_devices

if TYPE_CHECKING:
    from batchery_worker.models.verification import VerificationReport

#: Exit code if a batch gave different results.
DIFFERENT = 1

HELP = """Check that batches give what single texts give.

Loads each model of the settings on this machine, computes texts of many lengths in batches, padded
and packed, and compares with the same texts one by one in fp32. Needs neither Redis nor a worker.
A worker that runs meanwhile needs memory on the device, too.

\b
Exit codes:
  0    all within the tolerance of their number format
  1    some are not
  2    could not start: no such app, model or device
"""


def texts_option(instead: str) -> Callable[[Callable[..., Any]], Any]:
    """Gives a command `--texts FILE`, which it gets as the texts; none without a file."""

    def read(_: click.Context, __: click.Parameter, file: TextIO | None) -> list[str]:
        try:
            with file or nullcontext(()) as lines:
                return [text for line in lines if (text := line.strip())]
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"{file and file.name}: no text in UTF-8: {error}") from None

    kind, text = click.File(encoding="utf-8"), f"A text per line, {instead}."
    return click.option("--texts", type=kind, callback=read, help=text)


@click.command(help=HELP)
@click.argument("names", metavar="[MODEL]...", nargs=-1)
@click.option("-A", "--app", "app_path", default=DEFAULT_APP, help="Celery app.")
@click.option("--device", help="Such as cuda:1; else the first that a worker would use.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Not the model's own.")
@texts_option("instead of built-in ones")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model, on a line each.")
@click.pass_context
def verify(
    context: click.Context,
    *,
    names: Sequence[str],
    app_path: str,
    device: str | None,
    dtype: str | None,
    texts: Sequence[str],
    as_json: bool,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path)
    settings = get_installation(app).settings
    models = _chosen(settings, names)
    device = device or choose_devices(settings.devices)[0]
    # torch takes seconds to import: other commands must not pay for it.
    from batchery_worker.models import verification

    passed = True
    for name, model in models.items():
        changed = model.model_copy(update={"dtype": dtype} if dtype else {})
        report = verification.verify(changed, device, texts)
        passed = passed and report.passed
        click.echo(
            json.dumps({"model": name, **report.to_json()}) if as_json else _format(name, report)
        )
    context.exit(0 if passed else DIFFERENT)


def _chosen(settings: Settings, names: Sequence[str]) -> Mapping[str, ModelSettings]:
    """The models of these names; all of them where there is no name."""
    models = settings.models
    if not models:
        raise SettingsError("no models are configured; name some in batchery.toml, or an app by -A")
    for name in names:
        if name not in models:
            raise SettingsError(f"model {name!r}: not configured; there are {', '.join(models)}")
    return {name: models[name] for name in names or models}


def _format(name: str, report: "VerificationReport") -> str:
    """A report as lines of text."""
    bits = "" if report.quantize == "none" else f", weights in {report.quantize}"
    head = f"{name} on {report.device} in {report.dtype}{bits}, {report.texts} texts"
    allowed = report.tolerance
    lines = [f"{head}; allowed: {allowed.difference:.0e}, cosine {allowed.cosine}"]
    for each in report.comparisons:
        if each.difference is None or each.cosine is None:
            lines.append(f"  {each.forward}  not available, {each.why}")
            continue
        status = "passed" if each.passed else "FAILED"
        lines.append(
            f"  {each.forward}  {status}: largest difference {each.difference:.1e},"
            f" least cosine {each.cosine:.7f}"
        )
    return "\n".join(lines)
