"""`celery` with what a worker needs: a shell and colours are a third of the start of a worker."""

import sys
from types import SimpleNamespace
from typing import Any

from celery.__main__ import main

#: Name of a module -> what stands in for it: Celery goes without a command that cannot be imported,
#: makes a shell of `celery amqp` by the second, and writes without colours without the third.
LEFT_OUT: dict[str, Any] = {
    "flower": None,
    "click_repl": SimpleNamespace(register_repl=lambda _: None),
    "pygments.lexers": None,
}

if __name__ == "__main__":
    # The folder of this file, whose modules have names that apps may want.
    del sys.path[0]
    sys.modules.update(LEFT_OUT)
    main()
