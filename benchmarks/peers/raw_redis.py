"""Only the Redis commands that a job needs, on real Celery messages: the limit for all others.

Leases up to PEER_BATCH messages in one script, stores results, announces them and lets go of the
leases in another. Nothing is decoded and nothing is computed.
"""

import itertools
import os
import sys
from functools import partial
from typing import Any

from redis import Redis

from benchmarks.peers.celery_client import QUEUE, fill
from benchmarks.peers.celery_stock import app
from benchmarks.peers.peer import URL, main

BATCH = int(os.environ.get("PEER_BATCH", "256"))

#: As long as a stored result of Celery.
RESULT = b'{"status": "SUCCESS", "result": 0, "traceback": null, "children": [], "date_done": "?"}'

DRAIN = """
local raws = redis.call('RPOP', KEYS[1], ARGV[1]) or {}
local leases = {}
for number, raw in ipairs(raws) do
    leases[2 * number - 1] = ARGV[2] .. ':' .. number
    leases[2 * number] = raw
end
if #raws > 0 then redis.call('HSET', KEYS[2], unpack(leases)) end
return raws
"""

COMMIT = """
for number = 1, tonumber(ARGV[1]) do
    local token = ARGV[2] .. ':' .. number
    if redis.call('HDEL', KEYS[1], token) == 1 then
        local key = 'celery-task-meta-' .. token
        redis.call('SETEX', key, 86400, ARGV[3])
        redis.call('PUBLISH', key, ARGV[3])
    end
end
"""


def work() -> None:
    """Serves until it is ended."""
    redis: Any = Redis.from_url(URL)
    drain, commit = redis.register_script(DRAIN), redis.register_script(COMMIT)
    for batch in itertools.count():
        raws = drain(keys=[QUEUE, "leases"], args=[BATCH, batch])
        if raws:
            commit(keys=["leases"], args=[len(raws), batch, RESULT])


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    main(partial(fill, app, "noop"))
