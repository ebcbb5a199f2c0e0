"""What is measured, and how a whole system is tormented: `make bench`.

Not installed with the package; `python -m benchmarks.queue` in a clone of the repository.
"""

import os

# Celery ranks these above what a program says: jobs would go to that Redis, and not to the private
# one. Whoever has them in his shell has them for his own work.
for _name in (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "CELERY_RESULT_BACKEND",
):
    os.environ.pop(_name, None)
