-- Moves a message that kombu's own transport has taken to the list of a device; at most once.
-- Also while Redis is full: the first command needs no memory, and lets the others through.
--
-- KEYS[1]  HASH  unacked: kombu's, delivery tag -> message
-- KEYS[2]  ZSET  unacked_index: kombu's, delivery tag -> when it was taken
-- KEYS[3]  LIST  <prefix><queue>~batches: jobs of batch tasks that came by a queue of ordinary tasks.
--                Written here; devices take from it.
-- ARGV     delivery tag, message
-- Returns  1, or 0 if kombu no longer has it.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('LPUSH', KEYS[3], ARGV[2])
return 1
