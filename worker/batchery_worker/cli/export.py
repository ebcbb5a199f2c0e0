"""`batchery export`: makes the file that engine onnx computes."""

from pathlib import Path

import click

from batchery.engine_settings import ENGINE_KINDS

HELP = """Make the ONNX file of a model, for engine = "onnx".

Loads the model of FOLDER, of kind embedding, classification or rerank, on the CPU, and
writes FOLDER/onnx/model.onnx in fp32. Needs neither Redis nor a worker.
"""


@click.command(help=HELP)
@click.argument("kind", type=click.Choice(ENGINE_KINDS["onnx"]), metavar="KIND")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def export(*, kind: str, folder: Path) -> None:
    """Runs the command; see `HELP`."""
    # torch takes seconds to import: other commands must not pay for it.
    from batchery_worker.models import onnx_export

    click.echo(onnx_export.export(kind, folder))
