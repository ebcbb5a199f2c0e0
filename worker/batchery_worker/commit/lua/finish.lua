-- Finishes a job that Celery's tracer has completed: publishes its messages, stores and announces its
-- result, and acknowledges it. It does all of that if the lease is held, else nothing.
-- include result.lua
--
-- KEYS[1]   ZSET    workers, of the broker's database: worker id -> last heartbeat. Written by the
--                   transport's register and renew; a member goes with release or recovery.
-- KEYS[2]   HASH    lease:<worker>, of the broker's database: token -> queue key and message. Written
--                   by the transport's fetch; a field goes here, at an acknowledgement, a release or
--                   a recovery. If a token is missing, another worker has the job.
-- KEYS[3]   SET     sent:<publish tag>, of the broker's database: see publish_once.lua. Not written here.
-- KEYS[4]   STRING  <prefix>celery-task-meta-<task id>, of the result backend's database; see commit.lua.
-- KEYS[5..] LIST    queue of each message, of the broker's database; written by every publisher and here.
-- ARGV      worker id, number of the backend's database, of the broker's, seconds until a result
--           expires (0 for never), token, the value to store (empty for none), the messages
-- Returns   1 finished, 0 fenced, 2 unsure, with nothing done. Nil if this server does not know the
--           worker: the broker is another one, or the worker is fenced.
local worker, backend, broker, expires_s = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local token, value = ARGV[5], ARGV[6]
local workers, leases, sent, key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

if not use(broker, backend) or not is_known(workers, leases, worker) then
  return false
end
local held = redis.call('HEXISTS', leases, token) == 1
-- With dedupe keys, an earlier attempt has published messages one by one. The tracer must go on so.
local is_published = redis.call('EXISTS', sent) == 1

use(backend, broker)
if not held then
  return is_written(key, value) and 1 or 0
end
local may = value ~= '' and may_write(key) or 0
if is_published or may == 2 then
  return 2
end

use(broker, backend)
for i = 5, #KEYS do
  -- One whose key is of another type: nothing is published yet, so the tracer may try.
  local answer = redis.pcall('LLEN', KEYS[i])
  if type(answer) == 'table' and answer.err then
    return 2
  end
end
for i = 5, #KEYS do
  -- The first one may be refused as Redis is full.
  local answer = redis.pcall('LPUSH', KEYS[i], ARGV[i + 2])
  if type(answer) == 'table' and answer.err and i == 5 then
    return 2
  end
end
if may == 1 then
  use(backend, broker)
  write(key, value, expires_s)
  use(broker, backend)
end
redis.call('HDEL', leases, token)
return 1
