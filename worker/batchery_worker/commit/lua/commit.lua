-- Commits the results of a batch: stores, announces and acknowledges each one whose lease is held.
-- If the leases are on another server, held.lua has asked for them there. Then this script stores and
-- announces what it is given, and the caller ends the leases. In a cluster the keys are those of one
-- shard, there are no completion streams, and KEYS[1] and KEYS[2] are a key that nobody has.
-- include result.lua
--
-- KEYS[1]   ZSET    workers, of the broker's database: worker id -> last heartbeat. Written by the
--                   transport's register and renew; a member goes with release or recovery.
-- KEYS[2]   HASH    lease:<worker>, of the broker's database: token -> queue key and message. Written
--                   by the transport's fetch; a field goes here, at an acknowledgement, a release or
--                   a recovery. If a token is missing, another worker has the job.
-- KEYS[3..] STRING  for each job <prefix>celery-task-meta-<task id>, of the result backend's database:
--                   Celery's stored result, as JSON. Written by Celery's backends and here; read by
--                   every AsyncResult; goes when it expires or is forgotten. The channel of the same
--                   name gets what is stored.
-- then      STREAM  <prefix>batchery:reply:<name>, of the same database: the completion stream of each
--                   producer that asks for one; entries {ids: JSON list of committed task ids}. The
--                   producer makes, reads, trims and removes it; it expires an hour after the last
--                   read. Written here if it exists; at most some thousand entries.
-- ARGV      worker id, number of the backend's database (empty in a cluster), number of the broker's
--           (empty if that is on another server), seconds until each result expires with spaces between (0 for never; one
--           number for all of them), number of completion streams, the tokens with spaces between;
--           then for each job the value to store, empty for none; then for each stream: how many of
--           the jobs want it, and for each of those its number among the jobs and its task id.
-- Returns   a digit for each job: 1 committed, 0 fenced, 2 unsure, with nothing done. Nil if this
--           server does not know the worker: the broker is another one, or the worker is fenced.
--
-- Tokens and digits are one text each, because a client packs and reads every element on its own.
--
-- At most a few hundred keys, because Lua cannot unpack more than some thousands.
--
-- Leases end last. A command that Redis refuses ends the script without undoing what was done. Then
-- every lease is still held, and no job is lost.
local worker, backend, broker, expires_s = ARGV[1], ARGV[2], ARGV[3], words(ARGV[4])
local workers, leases, completion_streams = KEYS[1], KEYS[2], tonumber(ARGV[5])
local count = #KEYS - 2 - completion_streams
local has_leases, tokens = broker ~= '', words(ARGV[6])

local held = {}
if has_leases then
  if not use(broker, backend) or not is_known(workers, leases, worker) then
    return false
  end
  for i = 1, count do
    held[i] = redis.call('HEXISTS', leases, tokens[i]) == 1
  end
  use(backend, broker)
else
  begin_to_write(leases)
end

-- Usually no job has a stored result yet, so one EXISTS for all of them saves a look at each.
local fresh = redis.call('EXISTS', unpack(KEYS, 3, 2 + count)) == 0
local statuses, ended, written = {}, {}, {}
for i = 1, count do
  local key, value = KEYS[i + 2], ARGV[i + 6]
  if has_leases and not held[i] then
    statuses[i] = is_written(key, value) and 1 or 0
  else
    local may = 0
    -- A message that was published twice may be twice in one batch.
    if value ~= '' and not written[key] then
      may = fresh and 1 or may_write(key, not has_leases)
    end
    if may == 1 then
      write(key, value, tonumber(expires_s[i] or expires_s[1]), backend)
      written[key] = true
    end
    if may == 2 then
      statuses[i] = 2
    else
      statuses[i] = 1
      ended[#ended + 1] = tokens[i]
    end
  end
end

local at = count + 7
for i = 1, completion_streams do
  local last, done = at + 2 * tonumber(ARGV[at]), {}
  for j = at + 1, last, 2 do
    if statuses[tonumber(ARGV[j])] == 1 then
      done[#done + 1] = ARGV[j + 1]
    end
  end
  if #done > 0 then
    -- Producers also look for results, so an entry may fail; it must not stop the commit.
    local key, ids = KEYS[2 + count + i], cjson.encode(done)
    redis.pcall('XADD', key, 'NOMKSTREAM', 'MAXLEN', '~', 4096, '*', 'ids', ids)
  end
  at = last + 1
end

if has_leases and #ended > 0 then
  use(broker, backend)
  redis.call('HDEL', leases, unpack(ended))
end
return table.concat(statuses)
