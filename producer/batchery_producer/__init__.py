"""Submitting jobs in bulk: the producer's side of Batchery.

```python
from batchery_producer import submit_file

summary = submit_file("data.jsonl", "embed", "results.jsonl", app=app)
print(summary.succeeded, summary.failed, summary.rate)
```
"""

from batchery_producer.bulk import submit_file
from batchery_producer.summary import Ending, Snapshot, Summary

__all__ = ["Ending", "Snapshot", "Summary", "submit_file"]
