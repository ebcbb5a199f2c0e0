"""The messages between a worker and its device processes.

Messages to the device are pickled: a header of a job may be anything that brokers have. Messages
from the device are marshalled: marshal carries only plain data, so nothing of a model can make the
main process import torch.
"""

import marshal
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from batchery.settings import ModelSettings
from batchery.transport.suspects import Deaths


@dataclass(frozen=True, slots=True)
class JobsSetup:
    """What a device must know of the jobs that come to it."""

    #: Node name of the worker.
    hostname: str = ""
    sends_events: bool = False
    #: Soft and hard time limit of the command line.
    limits: tuple[float | None, float | None] = (None, None)
    #: Whether the worker hands the jobs over, and the device takes none itself.
    is_handed: bool = False
    #: Queue from which it takes -> task -> its maximum batch size.
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Ids of jobs that were revoked before.
    revoked: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a device process."""

    device: str
    sys_path: Sequence[str]
    #: Import path of the Celery app, as `module:attribute`.
    app: str
    #: Modules to import besides the app, so that all tasks are registered.
    modules: Sequence[str]
    #: Names of the tasks whose models are loaded before the device says that it is ready.
    load: Sequence[str]
    #: Level of each logger of the parent that has one; the root logger has an empty name.
    log_levels: Mapping[str, int]
    #: Share of the device's memory that it may use.
    memory_fraction: float = 1.0
    #: The task whose step model it serves, and no other one; and the number of slots.
    task: str = ""
    slots: int = 0
    #: The model that it computes for feeders, if it is the process of their card.
    computes: ModelSettings | None = None
    #: Where feeders reach that process; of a feeder also its number, from 1, and its card.
    address: bytes = b""
    feeder: int = 0
    card: str = ""
    #: The models that it serves -> why they are here.
    models: Mapping[str, str] = field(default_factory=dict)
    #: Those that only other device processes of the worker serve.
    elsewhere: frozenset[str] = frozenset()
    #: Those that stay loaded.
    pinned: frozenset[str] = frozenset()
    #: Memory for models; None for no limit, or for the default of a CUDA device.
    model_memory_bytes: int | None = None
    #: Settings of the Celery app: a program that starts a worker may set them after the import.
    conf: Mapping[str, Any] = field(default_factory=dict)
    #: Name of the task whose model must be there at the start, as it was ordered; empty for none.
    reloaded: str = ""
    jobs: JobsSetup = field(default_factory=JobsSetup)

    @property
    def name(self) -> str:
        """Name of the process: `cuda:0`, `cuda:0/chat` if it serves one task, a feeder `.../1`."""
        parts = (self.card or self.device, self.task, str(self.feeder or ""))
        return "/".join(filter(None, parts))

    def serves(self, task: str) -> bool:
        """Whether jobs of a task may come to it."""
        return task == self.task if self.task else task not in self.elsewhere

    def with_queues(self, sizes: Mapping[str, Mapping[str, int]]) -> "Setup":
        """The same for other queues: queue -> task -> maximum batch size."""
        mine = {
            queue: {name: size for name, size in each.items() if self.serves(name)}
            for queue, each in sizes.items()
        }
        jobs = replace(self.jobs, sizes={queue: each for queue, each in mine.items() if each})
        return replace(self, jobs=jobs)


class Stop(NamedTuple):
    """The device takes nothing more, finishes what it has begun, and ends."""


#: Property of a handed message with its `Handed`.
HISTORY = "batchery_history"


class Handed(NamedTuple):
    """A job for a device, of which its worker has the message."""

    token: str
    #: The message as kombu reads it from a queue.
    raw: Mapping[str, Any]
    #: What is known of devices that died while they ran it; None if it is no suspect.
    deaths: Deaths | None
    #: The hard time limit that it has reached, in seconds.
    expired_s: float | None


class Forget(NamedTuple):
    """The broker will deliver again what the device was handed: it drops what has not begun."""


class Fenced(NamedTuple):
    """Others have taken over what a holder had: its device registers anew."""

    holder: str


#: The order whose answer is but a sign of life.
SIGN = "batchery_sign"


class Order(NamedTuple):
    """A command of remote control, answered by `Answer`."""

    number: int
    name: str
    options: Mapping[str, Any]


class Ready(NamedTuple):
    """The device has loaded and warmed up its models."""

    pid: int
    load_s: float
    #: Figures of the device's models and memory.
    figures: Mapping[str, Any] | None = None


class NotReady(NamedTuple):
    """The device cannot start, and its process ends; or it has started, and its broker is none."""

    text: str


class ResultsWait(NamedTuple):
    """A batch is computed, and its results go to Redis; or it asks Redis before it begins.

    Redis may be away.
    """

    id: int
    #: Whether it was answered, and goes on.
    is_over: bool = False


class Began(NamedTuple):
    """An urgent batch has begun; what ran before goes on after it."""

    id: int


class Loads(NamedTuple):
    """The model of a batch is being loaded; the batch begins after that."""

    id: int
    #: How long that will take, in seconds, as far as anybody knows.
    expected_s: float


class Loaded(NamedTuple):
    """The load has ended: the batch begins, or fails because the model could not be loaded."""

    id: int
    #: As in `Ready`.
    figures: Mapping[str, Any] | None = None


class Stepped(NamedTuple):
    """Something has come of a step of a model with slots; told once a second, as a sign of life."""

    #: As in `Ready`.
    figures: Mapping[str, Any] | None = None


class Joined(NamedTuple):
    """The device has registered as a holder of leases, which its worker keeps alive."""

    holder: str
    #: Number of the broker or shard, see `list_places`.
    place: int


class Parted(NamedTuple):
    """A holder has no leases any more: its device has gone to another broker."""

    holder: str


class Fate:
    """What becomes of a handed message."""

    ACKNOWLEDGED = "acknowledged"
    REJECTED = "rejected"
    REQUEUED = "requeued"
    #: The device has dropped it.
    FORGOTTEN = "forgotten"


class Settled(NamedTuple):
    """A device is done with a handed message."""

    token: str
    #: One of `Fate`.
    fate: str


class Running(NamedTuple):
    """A batch whose time is limited is about to run; or nobody wants it any more."""

    id: int
    task: str
    job_ids: Sequence[str]
    hard_limit_s: float | None
    is_urgent: bool = False
    in_slots: bool = False
    is_unwanted: bool = False
    #: As in `Batch`.
    is_alone: bool = False


class Ended(NamedTuple):
    """Such a batch has ended."""

    id: int


class RecycleDue(NamedTuple):
    """The process has reached a limit, and should be recycled."""

    #: How many it has run.
    jobs: int


class Answer(NamedTuple):
    """The answer to an `Order`, in JSON."""

    number: int
    value: str


Message = Setup | Stop | Fenced | Order | Handed | Forget

#: What a device says of a batch whose time is limited.
OfBatch = Running | Began | Loads | Loaded | ResultsWait | Ended
Reply = OfBatch | Ready | NotReady | Stepped | Joined | Parted | RecycleDue | Answer | Settled
_REPLIES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Reply)}


def dump_message(message: Message) -> bytes:
    """Encodes a message to a device."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def load_message(frame: bytes) -> Any:
    """Decodes a message in the device."""
    return pickle.loads(frame)


def dump_reply(reply: Reply) -> bytes:
    """Encodes a message from a device."""
    fields: tuple[Any, ...] = tuple(reply)
    return marshal.dumps((type(reply).__name__, fields))


def load_reply(frame: bytes) -> Reply:
    """Decodes a message in the parent."""
    kind, fields = marshal.loads(frame)
    reply: Reply = _REPLIES[kind](*fields)
    return reply
