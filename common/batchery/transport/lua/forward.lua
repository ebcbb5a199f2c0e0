-- Moves a leased message to another list, whose consumers know what to do with it. Also while
-- Redis is full: the first command needs no memory, and lets the others through.
--
-- KEYS[1]  HASH  lease:<worker>, see fetch.lua
-- KEYS[2]  LIST  <prefix><queue>~ordinary: jobs of ordinary tasks that came by a queue of batch tasks.
--                Written here; consumed by the worker's own pool.
-- ARGV     token
-- Returns  1, or 0 if the lease was no longer held.
local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('LPUSH', KEYS[2], string.sub(value, string.find(value, '\0', 1, true) + 1))
return 1
