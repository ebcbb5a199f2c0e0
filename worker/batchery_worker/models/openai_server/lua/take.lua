-- Takes a request and its tokens out of two buckets, if both hold enough.
--
-- A bucket fills steadily up to its capacity. What is larger than that is taken from a full bucket,
-- whose level is below zero then: the next ones wait longer.
--
-- KEYS[1]  a hash: `at` in milliseconds, levels `requests` and `tokens` at that time
-- ARGV     1 whether to take at once, whatever the levels; then for requests and for tokens:
--          capacity (0 is no limit), how many come per millisecond, how many are taken
--
-- Returns for how many milliseconds there is too little; 0 if it has been taken.

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local at_ms = tonumber(known[1]) or now_ms
if at_ms > now_ms then
  -- The clock has gone back, as with a failover. Else nothing would come until that time is there.
  redis.call('HSET', KEYS[1], 'at', now_ms)
end
local elapsed_ms = math.max(0, now_ms - at_ms)

local wait_ms, full_ms = 0, 0
local levels = {}
for bucket = 1, 2 do
  local capacity = tonumber(ARGV[bucket * 3 - 1])
  local per_ms = tonumber(ARGV[bucket * 3])
  local taken = tonumber(ARGV[bucket * 3 + 1])
  levels[bucket] = 0
  if capacity > 0 then
    local level = math.min(capacity, (tonumber(known[bucket + 1]) or capacity) + elapsed_ms * per_ms)
    local lacking = math.min(taken, capacity) - level
    if ARGV[1] == '0' and lacking > 0 then
      wait_ms = math.max(wait_ms, math.ceil(lacking / per_ms))
    end
    levels[bucket] = math.min(capacity, level - taken)
    full_ms = math.max(full_ms, math.ceil((capacity - levels[bucket]) / per_ms))
  end
end

if wait_ms == 0 then
  redis.call('HSET', KEYS[1], 'at', now_ms, 'requests', levels[1], 'tokens', levels[2])
  -- A full bucket is as good as none.
  redis.call('PEXPIRE', KEYS[1], full_ms + 1000)
end
return wait_ms
