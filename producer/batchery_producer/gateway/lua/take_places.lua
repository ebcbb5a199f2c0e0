-- Takes a place in each of some sets, or in none: so many may work at once for a host, for example.
--
-- KEYS[..]  ZSET: tokens of those that work, by when they must be done, in Unix seconds
-- ARGV[1]   token
-- ARGV[2]   how long it may take, in seconds
-- ARGV[3..] how many places each set has
--
-- Returns 1, or 0 if one of the sets is full.

local time = redis.call("TIME")
local now_s = time[1] + time[2] / 1000000
for place, key in ipairs(KEYS) do
  redis.call("ZREMRANGEBYSCORE", key, "-inf", now_s)
  if redis.call("ZCARD", key) >= tonumber(ARGV[place + 2]) then
    return 0
  end
end
for _, key in ipairs(KEYS) do
  redis.call("ZADD", key, now_s + ARGV[2], ARGV[1])
  redis.call("EXPIRE", key, math.ceil(ARGV[2]))
end
return 1
