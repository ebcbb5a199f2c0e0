"""`celery`, without the commands of other packages: of a worker's start, Flower's is a fifth."""

import sys

from celery.__main__ import main

if __name__ == "__main__":
    # The folder of this file, whose modules have names that apps may want.
    del sys.path[0]
    # The worker goes without a package that cannot be imported.
    sys.modules["flower"] = None  # type: ignore[assignment]
    main()
