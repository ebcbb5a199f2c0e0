"""Every error that Batchery raises, in one tree.

```
BatcheryError
├── StartError                  a command or a worker cannot start: one line, exit code 2
│   ├── SettingsError           a setting is unknown, unreadable or impossible
│   ├── RedisUnavailable        no Redis answers, or none can be started
│   ├── DeviceUnavailable       the device asked for is not there
│   ├── ModelLoadError          a model cannot be loaded
│   ├── AppNotImportable        a device process could not import the Celery app
│   └── DatasetError            the input or output of a bulk run cannot be used
├── PublishError                jobs were not sent; `sent` says how many of them were
│   ├── QueueFull               the queue holds as many jobs as it may; `retry_after_s` is a hint
│   └── BrokerRefused           the broker is full, read-only, or forbids it
├── BatcherClosed               a batcher takes no calls any more; also a RuntimeError
├── NoResult                    no result has come for as long as the caller waits
│   └── UnknownJob              there is no stream of this job to follow, and no result
├── GaveUp                      Redis stays away
├── BatchArgumentError          a call that is not `task(item, **keywords)`; also a TypeError
└── ItemError                   why one job failed; stored as its result, raised by `get()`
    ├── InvalidItem             the item breaks a limit or has the wrong type; also a ValueError
    │   └── PromptTooLong       a prompt, with the text that it asks for, is too long for its model
    ├── ItemFailed              the function said `Failed("why")`
    ├── WrongLength             the function returned more or fewer outcomes than items
    ├── UnserialisableResult    the outcome cannot be written as JSON
    ├── OutOfMemory             the device has no memory for this item alone
    ├── ServerFailed            the server that computes it is away, refuses, or sends nonsense
    │   ├── ServerBusy          it still takes no more requests; `retry_after_s` is a hint
    │   └── ServerRefused       it refuses whoever asks: a wrong key, no quota, no such model
    ├── DeadlineExceeded        the job could not make its deadline, and was not begun
    └── DeviceDied              the job killed its device process or worker, each time alone
```

Every error takes one text, so that it survives the trip through a JSON result backend: a caller
catches the same error that the worker raised.
"""

import re


class BatcheryError(Exception):
    """Root of the tree; its text names the thing, what was wrong and what to do."""

    #: Exit code of a command that ends with this error, in one line; 69 is `os.EX_UNAVAILABLE`.
    exit_code = 69


class StartError(BatcheryError):
    """A command or worker cannot start; printed as one line, exit code 2."""

    exit_code = 2


class SettingsError(StartError):
    """A setting is unknown, unreadable or impossible."""


class RedisUnavailable(StartError):
    """No Redis answers at the URL, or no redis-server could be started."""


class DeviceUnavailable(StartError):
    """The device that was asked for does not exist on this machine."""


class ModelLoadError(StartError):
    """A model cannot be loaded: not found, not of this kind, or too large."""


class AppNotImportable(StartError):
    """A device process could not import the Celery app or one of its tasks."""


class DatasetError(StartError):
    """The input or output of a bulk run cannot be read, written or understood."""


class PublishError(BatcheryError):
    """Some or all of a call's jobs could not be sent; the first `sent` of them were."""

    #: How many of the call's jobs are in the queue, counted from the first.
    sent = 0


class QueueFull(PublishError):
    """The queue holds as many jobs as the caller allows."""

    #: When to try again, in seconds from now; a hint.
    retry_after_s = 1.0


class BrokerRefused(PublishError):
    """The broker answers, but takes no jobs: no memory, a replica, no permission."""


class BatcherClosed(BatcheryError, RuntimeError):
    """The batcher is closed, or its thread is in another process; the text says which."""


class NoResult(BatcheryError):
    """No result came for as long as the caller waits; the text says what the queue is doing."""


class UnknownJob(NoResult):
    """A stream cannot be followed: nothing is known of the job, or no longer."""


class GaveUp(BatcheryError):
    """Redis stays away, so jobs cannot be sent or their results cannot be read."""


class BatchArgumentError(BatcheryError, TypeError):
    """A batch task was called with something other than one item and keywords."""


class ItemError(BatcheryError):
    """Why one job failed; its batch mates are not affected."""


class InvalidItem(ItemError, ValueError):
    """The item has the wrong type or breaks a limit; names the field and the limit."""


class PromptTooLong(InvalidItem):
    """A prompt, with the new tokens that it asks for, is longer than its model's limit."""


class ItemFailed(ItemError):
    """The function answered `Failed("why")` for this item."""


class WrongLength(ItemError):
    """The function returned more or fewer outcomes than it was given items."""


class UnserialisableResult(ItemError):
    """The outcome of this item cannot be written as JSON."""


class OutOfMemory(ItemError):
    """The device has no memory for this item, even alone."""


class ServerFailed(ItemError):
    """The server that computes this item is away, refuses, or sends what cannot be read."""


#: Maximum pause that a server may ask for, in seconds.
MAX_PAUSE_S = 86_400.0


class ServerBusy(ServerFailed):
    """The server that computes this item takes no more requests for now, after all attempts."""

    @property
    def retry_after_s(self) -> float:
        """When to try again, in seconds from now: the pause that its text names; a hint."""
        # Results of jobs have an error's text alone, and in it may be any words of the server.
        pauses = re.findall(r"a pause of (\d+(?:\.\d+)?(?:e[+-]?\d+)?) s", str(self), re.ASCII)
        return min(float(pauses[-1]), MAX_PAUSE_S) if pauses else 1.0


class ServerRefused(ServerFailed):
    """The server that computes this item refuses whoever asks; another attempt changes nothing."""


class DeadlineExceeded(ItemError):
    """The job could not make its deadline any more; with `shed_late` such jobs are not begun."""


class DeviceDied(ItemError):
    """The job was running alone each time when its device process, or its worker, died."""


#: What to do with a list where one item belongs, for a message.
ONE_JOB_EACH = "send several items as several jobs, as submit_many does"


def counted(number: int, noun: str) -> str:
    """A number with its noun, for a message: `1 batch`, `2,000 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
