"""Saves an eighth of the imports of what tests start, which most of their time goes into.

Python imports it at its start, from `PYTHONPATH`.
"""

import gc
import sys
from typing import Any

# As a worker has it once it runs (bootstep.py). What is imported is no garbage: Python would look a
# thousand times among the 400,000 objects of torch and transformers.
gc.set_threshold(20_000, 20, 20)

#: Modules that others import where they are installed, and that no test needs: the metrics of
#: redis-py itself.
LEFT_OUT: dict[str, Any] = {"opentelemetry.sdk.metrics": None}

sys.modules.update(LEFT_OUT)
