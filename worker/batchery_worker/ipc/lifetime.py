"""How a device process ends, and what it keeps from its children, who may outlive it."""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from celery import signals

from batchery.fork_gate import fork_gate

#: Option of Linux's prctl(2): which signal a process gets when its parent dies.
PR_SET_PDEATHSIG = 1

#: What a terminal, or who stops a service, sends to all of its processes.
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


def leave_signals_to_parent() -> None:
    """Has this process outlive the signals of its group: the parent decides when it ends.

    On Linux this process dies with the thread that has started it, so that thread must live on.
    """
    before = {each: signal.signal(each, _ignore) for each in LEFT_TO_PARENT}
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        for each, handler in before.items():
            if signal.getsignal(each) is _ignore:
                signal.signal(each, handler)
        unblock()

    # Blocked meanwhile, as a child that is ended as soon as it is there would ignore that.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
    # The end of the pipe says so, too, but not while a forward pass holds the interpreter.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _ignore(*_: object) -> None:
    """A handler in place of SIG_IGN, which children would inherit: nothing could end them."""


def open_pipe(descriptor: int) -> socket.socket:
    """Opens an inherited end of a pipe.

    It is kept from children: while one of them held it, the parent would not see its end.
    """
    end = socket.socket(fileno=descriptor)
    # A parent on green threads has made it non-blocking.
    end.setblocking(True)
    end.set_inheritable(False)
    fork_gate.keep_private(end)
    return end


def end_process(*, has_app: bool) -> NoReturn:
    """Ends this process as Celery's pools end theirs; what hangs meanwhile, the parent kills.

    Args:
        has_app: Whether an app was started whose receivers of `worker_process_shutdown` are called.
    """
    try:
        if has_app:
            signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
        # No more of the interpreter's end: it waits for all threads, and torch's may crash in it.
        atexit._run_exitfuncs()
        # What was printed while the app was imported; None without a terminal or a file for it.
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    finally:
        os._exit(0)
