"""A group of processes, one for each part of a device, that computes models together.

Each process, a rank, holds a slice of every layer, and gets from the others what it lacks in the
midst of a pass. Rank 0 is the device process that the worker knows. It starts its peers, which load
what it loads, and repeats each call of a model to them over a socket. Any rank's death is the death
of them all, so that the worker sees one device that died.
"""

import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers.distributed.configuration_utils import DistributedConfig

from batchery.errors import DeviceUnavailable, ModelLoadError
from batchery_worker.devstack.guarded_process import GuardedProcess, python_command
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.models.split import SharedCall, Whole, memory_share

logger = logging.getLogger("batchery.device")

#: How long a rank may wait for another one. The settings `max_pass_s` and `device_start_timeout_s`
#: are the limits; this one is for those who set none.
TIMEOUT = timedelta(hours=2)

#: How long a rank may take to end once rank 0 is gone, in seconds.
ORPHANED_S = 0.5

#: How long rank 0 has to say what went wrong, after a peer has ended while models load, in seconds.
LAST_WORDS_S = 2.0

#: Exit code after the death of a peer; the parent treats it like any other death.
EX_SOFTWARE = 70

#: What a peer runs.
PEER = "batchery_worker.models.split.peer"

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

#: All ranks are on one machine, so nobody else need reach them. No CUDA graph has their calls.
LOOPBACK = {"linux": "lo"}.get(sys.platform, "lo0")
VARIABLES = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
}


class Group(Whole):
    """This process's place in a group."""

    is_whole: ClassVar[bool] = False

    def __init__(self, device: str, rank: int, folder: Path) -> None:
        """Joins, which waits for all ranks.

        Raises:
            DeviceUnavailable: A part of the device is not there.
        """
        parts = device.split("+")
        super().__init__(parts[rank])
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise DeviceUnavailable(
                f"device {device!r}: transformers would take the cards of this machine; hide them"
                " by CUDA_VISIBLE_DEVICES="
            )
        self._name = device
        self._rank = rank
        self._peers: list[socket.socket] = []
        #: What is called together, by model and name.
        self._calls: dict[tuple[int, str], Callable[..., Any]] = {}
        #: Number of the model that loads; 0 if none does.
        self._loading = 0
        self.ranks = len(parts)
        self.options = {"distributed_config": DistributedConfig(tp_size=self.ranks)}
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self.ranks))
        # transformers takes the rank's card from there.
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        self._folder = folder
        if rank == 0:
            self._start_peers(parts)
        on_card = self.device.type == "cuda"
        if on_card:
            torch.cuda.set_device(self.device)
        distributed.init_process_group(
            BACKENDS[self.device.type],
            store=FileStore(str(folder / "ranks"), self.ranks),
            rank=rank,
            world_size=self.ranks,
            timeout=TIMEOUT,
            device_id=self.device if on_card else None,
        )

    def _start_peers(self, parts: Sequence[str]) -> None:
        for rank in range(1, len(parts)):
            end, theirs = socket.socketpair()
            with theirs:
                process = GuardedProcess(
                    [*python_command(), "-m", PEER, str(theirs.fileno())],
                    grace_s=ORPHANED_S,
                    remove=self._folder,
                    keep_open=[theirs.fileno()],
                    on_line=partial(logger.warning, "rank %d: %s", rank),
                )
            self._peers.append(end)
            setup = (sys.path, self._name, rank, self._folder, memory_share(self.device))
            write_frame(end, pickle.dumps(setup))
            name = f"rank {rank} of {self._name}"
            threading.Thread(target=self._watch, args=(name, process), daemon=True).start()

    def _watch(self, name: str, process: GuardedProcess) -> NoReturn:
        code = process.wait()
        if self._loading:
            time.sleep(LAST_WORDS_S)
        _end(f"{name} has ended with exit code {code}")

    def begin(self, model: Any, config: Any) -> None:
        """Looks whether the model can be cut into slices, then has the peers load it, too."""
        check_slices(model.settings.model, config, self.ranks)
        if self._rank == 0:
            self._loading = id(model)
            self._tell("load", self._loading, type(model), model.settings)

    def place(self, model: torch.nn.Module) -> None:
        """Does nothing: each rank has loaded its slices where they belong."""

    def agree(self, number: int) -> int:
        """The least of the numbers that the ranks have."""
        least = torch.tensor(number, device=self.device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return int(least)

    def share(self, calls: Sequence[SharedCall]) -> None:
        """Has rank 0 repeat these calls to its peers, and the peers make them."""
        for owner, name in calls:
            key = (self._loading, name)
            self._calls[key] = getattr(owner, name)
            if self._rank == 0:
                setattr(owner, name, self._lead(key))
        self._loading = 0

    def release(self, model: Any) -> None:
        """Has the peers forget a model."""
        self._tell("release", id(model))
        self._forget(id(model))

    def _forget(self, number: int) -> None:
        self._calls = {key: call for key, call in self._calls.items() if key[0] != number}

    def _lead(self, key: tuple[int, str]) -> Callable[..., Any]:
        call = self._calls[key]

        def lead(*args: Any, **keywords: Any) -> Any:
            with undisturbed():
                try:
                    self._tell("call", key, args, keywords)
                    return call(*args, **keywords)
                except BaseException as error:
                    logger.debug("%s", self._name, exc_info=True)
                    _end(f"a call on {self._name} has failed: {type(error).__name__}: {error}")

        return lead

    def _tell(self, *message: Any) -> None:
        frame = pickle.dumps(message)
        for peer in self._peers:
            write_frame(peer, frame)

    def follow(self, end: socket.socket) -> None:
        """Does as rank 0 does, until it is gone."""
        while True:
            try:
                order, *what = pickle.loads(read_frame(end))
            except EOFError:
                return
            if order == "call":
                key, args, keywords = what
                self._calls[key](*args, **keywords)
            elif order == "load":
                self._loading, kind, settings = what
                kind(settings).load(self._name)
            else:
                self._forget(*what)


def check_slices(name: str, config: Any, ranks: int) -> None:
    """Makes sure that a model can be cut into slices.

    Raises:
        ModelLoadError: It cannot; says what to use instead.
    """
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelLoadError(
            f"model {name!r}: transformers has no plan by which to cut a {config.model_type} into"
            f" slices for {ranks} devices; set split = 'layers', or name one device"
        )
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, heads, None) or ranks
        if count % ranks:
            raise ModelLoadError(
                f"model {name!r}: {ranks} devices cannot share its {heads} = {count}; name as many"
                " as divide it, or set split = 'layers'"
            )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Has a soft time limit wait for the end of the block: the other ranks would go on."""
    expire = signal.getsignal(signal.SIGALRM)
    expired: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGALRM, lambda *args: expired.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, expire)
        if expired and callable(expire):
            expire(*expired[0])


def _end(problem: str) -> NoReturn:
    """Ends this process, and thereby its peers, which may wait for each other for ever."""
    logger.critical("%s; the whole device ends", problem)
    os._exit(EX_SOFTWARE)


#: The group of this process; torch knows one.
_group: Group | None = None


def enter_group(device: str, rank: int = 0, folder: Path | None = None) -> Group:
    """The group of this process, which is made at the first call.

    Args:
        device: Its parts, with `+` between them.
        rank: Of this process.
        folder: Where the ranks find each other; None makes one.

    Raises:
        DeviceUnavailable: A part is not there, or this process is no device process.
    """
    global _group
    if threading.current_thread() is not threading.main_thread():
        raise DeviceUnavailable(
            f"device {device!r}: several processes load a model together when their main threads"
            " do: give an Engine process=True"
        )
    if _group is None:
        _group = Group(device, rank, folder or Path(tempfile.mkdtemp(prefix="batchery-ranks-")))
    return _group
