-- One heartbeat: all leases of a worker live as long as it does.
--
-- KEYS[1]  ZSET  workers, see register.lua
-- KEYS[2]  HASH  worker-info, see register.lua; written here, as a worker consumes other queues later
-- ARGV     worker id, info; no info leaves what there is
-- Returns every worker with its last heartbeat, so that one command serves renewal and observation;
-- nil if this one is not among them: it is fenced.
--
-- ZREM first, as in register.lua: at maxmemory a heartbeat must not fail.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then
  return false
end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
