-- Begins a turn of a batch: from now on, whoever had the turn before can save nothing.
--
-- KEYS[1]  HASH: the batch
-- KEYS[2]  ZSET: work by when it is due, in Unix seconds
-- ARGV[1]  number of the turn; -1 for the next one, whatever its number
-- ARGV[2]  token of this attempt
-- ARGV[3]  its work
-- ARGV[4]  when that is due again
--
-- Returns the record and the number of the turn; nil if there is no such turn any more.

local turn = redis.call("HGET", KEYS[1], "turn")
if not turn or (ARGV[1] ~= "-1" and ARGV[1] ~= turn) then
  return nil
end
redis.call("HSET", KEYS[1], "attempt", ARGV[2])
redis.call("ZADD", KEYS[2], ARGV[4], ARGV[3])
return {redis.call("HGET", KEYS[1], "record"), turn}
