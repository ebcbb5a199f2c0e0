"""Submitting jobs in bulk: the producer's side of Batchery.

```python
from batchery_producer import Client

embed = Client("redis://localhost:6379/0").task("embed")
for vector in embed.map(texts, per_job=64):
    ...
```
"""

from batchery.errors import GaveUp
from batchery_producer.answers import Outcome
from batchery_producer.async_client import AsyncClient, AsyncTask
from batchery_producer.client import Client, TaskClient
from batchery_producer.files.options import Ending, Snapshot, SubmitOptions, Summary
from batchery_producer.files.run import submit_file
from batchery_producer.media import put_media
from batchery_producer.piece_stream import AsyncPieceStream, PieceStream
from batchery_producer.publisher import Publisher

__all__ = [
    "AsyncClient",
    "AsyncPieceStream",
    "AsyncTask",
    "Client",
    "Ending",
    "GaveUp",
    "Outcome",
    "PieceStream",
    "Publisher",
    "Snapshot",
    "SubmitOptions",
    "Summary",
    "TaskClient",
    "put_media",
    "submit_file",
]
