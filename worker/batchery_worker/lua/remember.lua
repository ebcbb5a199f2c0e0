-- Puts results into the cache of one task, and evicts the oldest ones beyond its limit.
--
-- KEYS[1]   ZSET    <prefix>batchery:cache-ages:<task>, of the result backend's database: digest of an
--                   input -> when its result expires, in milliseconds. Written here only; goes with
--                   the last of the results.
-- KEYS[2]   HASH    <prefix>batchery:cache-sizes:<task>, of the same database: digest -> bytes that are
--                   counted for it, and `total`. Written here only; goes with the last of the results.
-- KEYS[3..] STRING  <prefix>batchery:cache:<task>:<digest>, of the same database: CRC-32 of the result's
--                   JSON, 4 bytes, then the JSON. Written here; read by every device that gets the same
--                   input; goes when it expires or is evicted here.
-- ARGV      milliseconds until a result expires, maximum number of bytes of all results, prefix of
--           KEYS[3..], bytes that Redis needs per result in addition to its value; then for each
--           result: digest, value.
-- Returns   bytes that are counted now, number of results, number of evicted results.
local ages, sizes = KEYS[1], KEYS[2]
local ttl_ms, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local prefix, overhead = ARGV[3], tonumber(ARGV[4])

-- At maxmemory Redis refuses a first write that may need memory. Then nothing is added; what is too
-- old or too much goes all the same, as it may be what fills Redis.
local total = redis.pcall('HINCRBY', sizes, 'total', 0)
local refusal = type(total) == 'table' and total
if refusal then
  total = tonumber(redis.call('HGET', sizes, 'total') or 0)
end
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

-- It forgets more expired results than one call can add, so that they do not pile up.
forget(redis.call('ZRANGEBYSCORE', ages, '-inf', now_ms, 'LIMIT', 0, 1000))

for i = 3, refusal and 0 or #KEYS do
  local digest, value = ARGV[2 * i - 1], ARGV[2 * i]
  -- If another worker has computed the same, its result stays, with its expiry.
  if redis.call('SET', KEYS[i], value, 'PX', ttl_ms, 'NX') then
    local size = #value + overhead
    total = total + size - (tonumber(redis.call('HGET', sizes, digest)) or 0)
    redis.call('ZADD', ages, now_ms + ttl_ms, digest)
    redis.call('HSET', sizes, digest, size)
  end
end

-- Evicts a hundred at a time, as many as Lua's `unpack` takes easily, and often enough that a lowered
-- limit is soon kept.
local evicted = 0
for _ = 1, 100 do
  if total <= max_bytes then
    break
  end
  local oldest = redis.call('ZRANGE', ages, 0, 99)
  if #oldest == 0 then
    total = 0
    break
  end
  local over, gone = total - max_bytes, {}
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
if refusal then
  return refusal
end
return {total, redis.call('ZCARD', ages), evicted}
