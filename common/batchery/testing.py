"""For the tests of programs that use Batchery: a batcher with a clock of the test's own.

```python
from batchery.testing import ManualBatcher

batcher = ManualBatcher(embed, max_wait_ms=50)
first, second = batcher.submit("a"), batcher.submit("b")
batcher.advance(0.05)
assert batcher.batches == [["a", "b"]]
```
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchery_worker.inprocess.manual import ManualBatcher

__all__ = ["ManualBatcher"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("batchery_worker.inprocess.manual"), name)
