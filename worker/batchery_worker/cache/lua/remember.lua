-- Puts results into the cache of one task, and takes out the oldest ones beyond its limit.
--
-- KEYS[1]   ZSET    <prefix>batchery:cache-ages:<task>, of the result backend's database: digest of an
--                   input -> when its result expires, in milliseconds. Written here only; goes with
--                   the last of the results.
-- KEYS[2]   HASH    <prefix>batchery:cache-sizes:<task>, of the same database: digest -> bytes that are
--                   counted for it, and `total`. Written, read and gone like the other.
-- KEYS[3..] STRING  <prefix>batchery:cache:<task>:<digest>, of the same database: CRC-32 of the JSON of
--                   the result, 4 bytes, then the JSON. Written here; read by every device that is given the input again; goes when it
--                   expires, or here, when there is no room.
-- ARGV      milliseconds until a result expires, most bytes of all of them, what KEYS[3..] begin with,
--           bytes that Redis needs beside a result; then for each result: digest, and what to store.
-- Returns   bytes that are counted now, number of results, how many had to go for lack of room.
local ages, sizes = KEYS[1], KEYS[2]
local ttl_ms, most, prefix, beside = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

-- At maxmemory Redis refuses a script whose first write needs memory, and none that has written.
local total = redis.call('HINCRBY', sizes, 'total', 0)
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function forget(digests)
  if #digests == 0 then
    return
  end
  for _, size in ipairs(redis.call('HMGET', sizes, unpack(digests))) do
    total = total - (tonumber(size) or 0)
  end
  local keys = {}
  for i, digest in ipairs(digests) do
    keys[i] = prefix .. digest
  end
  redis.call('DEL', unpack(keys))
  redis.call('HDEL', sizes, unpack(digests))
  redis.call('ZREM', ages, unpack(digests))
end

-- More than one call can add: what has expired does not pile up.
forget(redis.call('ZRANGEBYSCORE', ages, '-inf', now_ms, 'LIMIT', 0, 1000))

for i = 3, #KEYS do
  local digest, value = ARGV[2 * i - 1], ARGV[2 * i]
  -- Another worker may have computed the same: then its result stays, with its time.
  if redis.call('SET', KEYS[i], value, 'PX', ttl_ms, 'NX') then
    local size = #value + beside
    total = total + size - (tonumber(redis.call('HGET', sizes, digest)) or 0)
    redis.call('ZADD', ages, now_ms + ttl_ms, digest)
    redis.call('HSET', sizes, digest, size)
  end
end

-- As many as fit in one call of Lua's `unpack`, so often that a limit that was lowered is soon kept.
local evicted = 0
for _ = 1, 100 do
  if total <= most then
    break
  end
  local oldest = redis.call('ZRANGE', ages, 0, 99)
  if #oldest == 0 then
    total = 0
    break
  end
  local over, gone = total - most, {}
  for i, size in ipairs(redis.call('HMGET', sizes, unpack(oldest))) do
    if over <= 0 then
      break
    end
    over = over - (tonumber(size) or 0)
    gone[i] = oldest[i]
  end
  forget(gone)
  evicted = evicted + #gone
end

redis.call('HSET', sizes, 'total', total)
for _, key in ipairs({ages, sizes}) do
  if redis.call('PTTL', key) < ttl_ms then
    redis.call('PEXPIRE', key, ttl_ms)
  end
end
return {total, redis.call('ZCARD', ages), evicted}
