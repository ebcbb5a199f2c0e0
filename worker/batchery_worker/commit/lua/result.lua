-- What commit.lua, finish.lua and store.lua have in common; they include it. No script itself.

-- Enters one of the two databases that a script works in.
local function use(database, other)
  if database ~= other then
    redis.call('SELECT', database)
  end
end

-- Whether this server knows the worker; false where the broker is another one, or the worker was given
-- up. In the broker's database, before anything else is written.
local function is_known(workers, leases, worker)
  if not redis.call('ZSCORE', workers, worker) then
    return false
  end
  -- Removes nothing. At maxmemory Redis refuses a script that begins with a write for which it needs
  -- memory, but not one that has written before: 6.2 and 7.0.
  redis.call('HDEL', leases, '')
  return true
end

-- Whether a result may be written: 0 no, as a SUCCESS is stored; 1 yes; 2 unsure.
local function may_write(key)
  local head = redis.pcall('GETRANGE', key, 0, 63)
  if type(head) ~= 'string' then
    return 2
  end
  if head == '' then
    return 1
  end
  -- Both spellings that JSON libraries have begin like this: {"status": "X" and {"status":"X".
  -- Anything else (compressed, another serializer, another order of fields) is left to Celery's
  -- own decoders, as a SUCCESS may hide in it.
  local status = string.match(head, '^{%s*"status"%s*:%s*"([^"]*)"')
  if not status then
    return 2
  end
  return status == 'SUCCESS' and 0 or 1
end

-- Stores a result and announces it; `expires_s` is 0 for never.
local function write(key, value, expires_s)
  if expires_s > 0 then
    redis.call('SET', key, value, 'EX', expires_s)
  else
    redis.call('SET', key, value)
  end
  redis.call('PUBLISH', key, value)
end

-- Whether a result that was sent again, as the answer was lost, is ours to the last byte. It says when
-- the job was done, to the microsecond, and in which batch.
local function is_written(key, value)
  return value ~= '' and redis.pcall('GET', key) == value
end
