"""Signals of a device process: its parent decides when it ends."""

import ctypes
import signal
import sys


def leave_signals_to_parent() -> None:
    """Ctrl-C reaches the whole process group, but the parent decides when to end.

    On Linux this process dies with the thread that has started it, so that thread must live on.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        # If the parent dies while a forward pass holds the interpreter, the kernel ends us.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
