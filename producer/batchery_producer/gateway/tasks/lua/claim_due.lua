-- Takes what is due from a sorted set of times, until a lease ends: one gateway alone gets it.
-- KEYS[1]: the set: members by when they are due, in Unix seconds.
-- ARGV[1]: how long the lease is, in seconds.
-- ARGV[2]: how many members to take at most.
local time = redis.call("TIME")
local now_s = time[1] + time[2] / 1000000
local due = redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", now_s, "LIMIT", 0, ARGV[2])
for _, member in ipairs(due) do
  redis.call("ZADD", KEYS[1], now_s + ARGV[1], member)
end
return due
