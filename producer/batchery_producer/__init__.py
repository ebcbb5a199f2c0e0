"""Submitting jobs in bulk: the producer's side of Batchery.

```python
from batchery_producer import Client

embed = Client("redis://localhost:6379/0").task("embed")
for vector in embed.map(texts, per_job=64):
    ...
```
"""

from batchery_producer.aio import AsyncClient, AsyncTask
from batchery_producer.bulk import submit_file
from batchery_producer.client import Client, TaskClient
from batchery_producer.packs import Outcome
from batchery_producer.patience import GaveUp
from batchery_producer.publish import Publisher
from batchery_producer.stream import Progress
from batchery_producer.summary import Ending, Snapshot, Summary

__all__ = [
    "AsyncClient",
    "AsyncTask",
    "Client",
    "Ending",
    "GaveUp",
    "Outcome",
    "Progress",
    "Publisher",
    "Snapshot",
    "Summary",
    "TaskClient",
    "submit_file",
]
