"""Tells systemd how a service is: `Type=notify` and `WatchdogSec=` of its unit ask for it."""

import os
import socket

MICROSECONDS = 1e6


def is_listening() -> bool:
    """Whether systemd has started this process, and waits for its word."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(state: str) -> None:
    """Sends a word such as `READY=1`; does nothing where nobody listens.

    Raises:
        OSError: Its socket is gone.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # An @ stands for the zero byte of an abstract name.
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        sender.sendall(state.encode())


def read_watchdog_s() -> float | None:
    """After how many seconds without `WATCHDOG=1` systemd kills this process; None if never."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or pid not in ("", str(os.getpid())):
        return None
    return int(usec) / MICROSECONDS or None
