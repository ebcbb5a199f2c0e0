"""A peer of rank 0: `python -m batchery_worker.models.split.peer DESCRIPTOR`."""

import logging
import os
import pickle
import signal
import socket
import sys

from batchery_worker.ipc.framing import read_frame


def main(descriptor: int) -> None:
    """Joins the group, and does as rank 0 does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rank 0 has the same advice of libraries.
    logging.disable(logging.WARNING)
    end = socket.socket(fileno=descriptor)
    path, device, rank, folder, share = pickle.loads(read_frame(end))
    sys.path[:] = path
    # Only now, as the path says where it is.
    from batchery_worker.models.split import limit_memory
    from batchery_worker.models.split.group import EX_SOFTWARE, enter_group

    try:
        group = enter_group(device, rank, folder)
        limit_memory(group.device, share)
        group.follow(end)
    except Exception as error:  # noqa: BLE001 - rank 0 logs what is printed here
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(EX_SOFTWARE)
    # torch would wait for the other ranks.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
