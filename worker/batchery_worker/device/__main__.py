"""What the process of a device runs: reads what it is told, starts the device, and ends with it."""

import gc
import logging
import socket
import sys

from celery.result import denied_join_result

from batchery_worker.device.device import Device, begin, run_or_die
from batchery_worker.device.orders import listen
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.lifetime import end_process, leave_signals_to_parent, open_pipe
from batchery_worker.ipc.logs import ForwardingHandler, forward_logs
from batchery_worker.ipc.messages import Setup, load_message

#: How seldom Python looks for garbage while a device starts.
STARTING_GC_THRESHOLDS = (20_000, 20, 20)


def main(descriptor: int, log_descriptor: int | None = None) -> None:
    """Entry point: `python -m batchery_worker.device DESCRIPTOR [LOG_DESCRIPTOR]`.

    Args:
        descriptor: Of a socket to the parent.
        log_descriptor: Of another one, for what is logged; None writes that to standard error.
    """
    leave_signals_to_parent()
    end = open_pipe(descriptor)
    try:
        setup: Setup = load_message(read_frame(end))
    except EOFError:
        return
    device = Device(end)
    handler: logging.Handler = logging.StreamHandler()
    if log_descriptor is not None:
        log = open_pipe(log_descriptor)
        handler = ForwardingHandler(setup.name, log, lambda: device.current)
    forward_logs(handler, setup.log_levels)
    # As in Celery's own pools: a job that a function awaits may wait for this very device.
    with denied_join_result():
        usual = gc.get_threshold()
        # Imports of a model make 400,000 objects, of which none is garbage; Python would look
        # among them a thousand times, which takes a tenth of the start.
        gc.set_threshold(*STARTING_GC_THRESHOLDS)
        is_ready = begin(device, setup)
        gc.set_threshold(*usual)
        if is_ready:
            listen(end, device)
            run_or_die(device.run)
            # From now on it has no job, and little time to end.
            end.shutdown(socket.SHUT_RDWR)
        end_process(has_app=is_ready)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
