-- Enters a worker among the living.
--
-- KEYS[1]  ZSET    workers: worker id -> last heartbeat in ms, on this server's clock. Written here
--                  and by renew.lua; read by every worker; a member goes with release or recovery.
-- KEYS[2]  HASH    worker-info: worker id -> what others want to know of it, as JSON. The same life.
-- KEYS[3]  STRING  token, see fetch.lua
-- KEYS[4]  STRING  schema: the highest version of the layout of all these keys that a worker had.
--                  Written here; never expires.
-- ARGV     worker id, info, the last token that the worker knows of, the version that it knows
-- Returns  0; the version of the layout if the worker knows only an older one, or one below its own if
--          workers that know only that one live: then nothing is done.
local schema = tonumber(redis.call('GET', KEYS[4]) or '') or 0
if schema > tonumber(ARGV[4]) then
  return schema
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if schema > 0 and schema < tonumber(ARGV[4]) then
  local beats = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
  for i = 1, #beats, 2 do
    local expiry_s = string.match(redis.call('HGET', KEYS[2], beats[i]) or '', '"expiry_s": ([%d.]+)')
    if now - beats[i + 1] < 1000 * (tonumber(expiry_s) or 5) then
      return schema
    end
  end
end
-- At maxmemory a script may write once it has deleted something, and be it nothing: so ZREM first.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
-- After a FLUSHALL: a token of a job that still runs must not be given to another one.
if tonumber(redis.call('GET', KEYS[3]) or 0) < tonumber(ARGV[3]) then
  redis.call('SET', KEYS[3], ARGV[3])
end
if schema < tonumber(ARGV[4]) then
  redis.call('SET', KEYS[4], ARGV[4])
end
return 0
