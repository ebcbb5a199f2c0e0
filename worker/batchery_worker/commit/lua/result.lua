-- Functions for the other scripts here, which include it. No script itself.

-- Switches to one of the two databases that a script works in; false if this server has it not, so
-- that it must be another server's.
local function use(database, other)
  return database == other or not redis.pcall('SELECT', database).err
end

-- The words of a text.
local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
  end
  return found
end

-- Makes the first write of a script one that removes nothing. At maxmemory Redis (6.2, 7.0) refuses a
-- script whose first write needs memory, but not one that has written something before.
local function begin_to_write(leases)
  redis.call('HDEL', leases, '')
end

-- Whether this server knows the worker; false if the broker is another one, or the worker is fenced.
-- Call it in the broker's database, before anything else is written.
local function is_known(workers, leases, worker)
  if not redis.call('ZSCORE', workers, worker) then
    return false
  end
  begin_to_write(leases)
  return true
end

-- Whether a result may be written: 0 no, because a SUCCESS is stored; 1 yes; 2 unsure. A script that
-- cannot see the lease has `spares_failures`: another worker may have stored a failure just now.
-- `is_start` is for STARTED, which a worker stores without its lease: it overwrites no end of a job.
local function may_write(key, spares_failures, is_start)
  local head = redis.pcall('GETRANGE', key, 0, 63)
  if type(head) ~= 'string' then
    return 2
  end
  if head == '' then
    return 1
  end
  -- JSON libraries write either {"status": "X" or {"status":"X". Anything else (compressed, another
  -- serializer, another order of fields) may be a SUCCESS, and is left to Celery's own decoders.
  local status = string.match(head, '^{%s*"status"%s*:%s*"([^"]*)"')
  if not status then
    return 2
  end
  local is_failure = status == 'FAILURE' or status == 'REVOKED'
  if status == 'SUCCESS' or (is_failure and is_start) then
    return 0
  end
  return spares_failures and is_failure and 2 or 1
end

-- Stores a result and announces it; `expires_s` is 0 for never. Without a database it is a cluster's,
-- which would send the value to all of its nodes: those who hear of it read it.
local function write(key, value, expires_s, database)
  if expires_s > 0 then
    redis.call('SET', key, value, 'EX', expires_s)
  else
    redis.call('SET', key, value)
  end
  redis.call('PUBLISH', key, database ~= '' and value or '')
end

-- Whether exactly this result is stored, because an earlier call, whose answer was lost, has written
-- it. A result is unique: it has the batch, and the time to the microsecond.
local function is_written(key, value)
  return value ~= '' and redis.pcall('GET', key) == value
end
