-- Makes a dead letter of a leased message.
--
-- KEYS[1]  HASH  lease:<worker>, see fetch.lua
-- KEYS[2]  HASH  dead: token -> queue key, a zero byte, JSON of the dead letter. Written here; read
--                by `batchery dead`; the command removes a field, or
--                requeue_dead_letters.lua does.
-- KEYS[3]  HASH  dead-messages: token -> queue key, a zero byte, message. Written and
--                removed together with `dead`; kept apart, so that a list of dead letters stays small.
-- ARGV     token, JSON
-- Returns  1, or 0 if the lease was no longer held.
local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value then
  return 0
end
local cut = string.find(value, '\0', 1, true)
-- A full Redis refuses a script whose first write needs memory. The lease itself goes last, as the
-- keys of dead letters may have another type.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[3], ARGV[1], value)
redis.call('HSET', KEYS[2], ARGV[1], string.sub(value, 1, cut) .. ARGV[2])
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
