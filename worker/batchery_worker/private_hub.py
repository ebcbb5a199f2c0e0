"""An event loop of our own, for brokers that Celery serves without one."""

import threading

from kombu.asynchronous import Hub


class PrivateHub:
    """Runs a hub on a thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._thread = threading.Thread(target=hub.run_forever, name="batchery-hub", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after what it is doing, and the thread with it."""
        self._hub.stop()
        self._thread.join()
