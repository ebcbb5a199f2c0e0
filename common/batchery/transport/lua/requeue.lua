-- Gives leased messages back to their queues.
--
-- KEYS[1]  HASH  lease:<worker>, see drain.lua
-- ARGV     RPUSH (they are taken next) or LPUSH (after all others), then tokens in order of pushing
-- Returns  how many leases were still held.
local count = 0
for i = 2, #ARGV do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  if value then
    local cut = string.find(value, '\0', 1, true)
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call(ARGV[1], string.sub(value, 1, cut - 1), string.sub(value, cut + 1))
    count = count + 1
  end
end
return count
