"""Beyond which figure a check speaks up, in which unit, and what happens there."""

#: Share of Redis's memory; a burst of jobs fills the rest, and publishing is refused.
MAX_MEMORY_SHARE = 0.75

#: Waiting jobs; fewer of them say little about the memory of one.
MIN_BACKLOG_JOBS = 1000

#: A round trip, in milliseconds; each batch takes two, during which a fast device idles.
MAX_ROUND_TRIP_MS = 5.0

#: A command of Redis, in milliseconds; all workers and callers wait meanwhile.
MAX_COMMAND_MS = 100.0

#: Age of such a command, in seconds; older ones are history.
SLOW_WINDOW_S = 3600.0

#: Age of a replica's last answer, in seconds; a failover loses as much.
MAX_LAG_S = 10

#: Share of `maxclients`; a few more workers and callers are refused.
MAX_CLIENTS_SHARE = 0.8

#: Difference of two clocks, in seconds; deadlines, ETAs and expiries are off by it.
MAX_SKEW_S = 1.0

#: Messages that a process takes in advance of ordinary tasks; more of them keep other workers idle.
MAX_PREFETCH = 64

#: `result_expires`, in seconds; a shorter one ends before a caller who waits has read.
MIN_RESULT_S = 60.0

#: Share of jobs that take Celery's tracer; each costs as much as ten others.
MAX_TRACER_SHARE = 0.1

#: Share of computed tokens that are padding; the device computes so much for nothing.
MAX_PADDING = 0.3

#: Tokens, and batches; fewer of them say little about the usual ones.
MIN_TOKENS = 100_000
MIN_BATCHES = 100

#: Share of batches with one item, and jobs that wait meanwhile; such a device does a fraction of
#: what it could.
MAX_LONE_SHARE = 0.5
MIN_WAITING_JOBS = 100

#: Passes that ran out of memory; the token budget learns from the first few of them.
MAX_OUT_OF_MEMORY = 3

#: Share of a device's memory; the next long batch may not fit.
MAX_DEVICE_MEMORY = 0.95

#: Share of main memory; the kernel may kill a worker or Redis.
MAX_MAIN_MEMORY = 0.95

#: Files that a process may open; a gateway with fewer refuses callers when all are open.
MIN_OPEN_FILES = 1024

#: Bytes of /dev/shm beside a GPU; vLLM does not start with the 64 MiB of a container.
MIN_SHM_BYTES = 1 << 30
