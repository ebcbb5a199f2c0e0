"""Is Flower up, and does it see the worker? Asked over its own web pages."""

import json
import urllib.error
import urllib.request

#: How long Flower may take for one answer, in seconds.
TIMEOUT_S = 2.0


def flower_sees(url: str, worker: str) -> bool:
    """Whether Flower answers and has received an event of the worker.

    From then on it misses no job: answering alone only says that its web server runs.

    Args:
        url: Where Flower is, on this machine.
        worker: Name of the worker, as `name@host`.
    """
    # Straight there: a proxy of the environment has no way to this machine's own addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/workers?json=1", timeout=TIMEOUT_S) as answer:
            workers = json.load(answer)["data"]
        if all(each["hostname"] != worker for each in workers):
            return False
        # What it asked the worker at its own start, it asked too early.
        opener.open(f"{url}/api/workers?refresh=1", timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        # Up, but the user has switched on a login, or put it under another path.
        error.close()
    except (OSError, ValueError, KeyError):
        return False
    return True
