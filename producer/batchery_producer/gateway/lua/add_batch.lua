-- Keeps a new batch, unless its owner has as many open ones as may be.
--
-- KEYS[1]  HASH: the batch
-- KEYS[2]  ZSET: ids of the owner's batches
-- KEYS[3]  SET: ids of the owner's batches that are open
-- KEYS[4]  ZSET: work by when it is due, in Unix seconds
-- ARGV[1]  maximum number of open batches
-- ARGV[2]  its id
-- ARGV[3]  its owner
-- ARGV[4]  its record
-- ARGV[5]  its work
-- ARGV[6]  when that is due
--
-- Returns 1, or 0 if there are too many.

if redis.call("SCARD", KEYS[3]) >= tonumber(ARGV[1]) then
  return 0
end
redis.call("HSET", KEYS[1], "owner", ARGV[3], "record", ARGV[4], "turn", 0)
redis.call("ZADD", KEYS[2], 0, ARGV[2])
redis.call("SADD", KEYS[3], ARGV[2])
redis.call("ZADD", KEYS[4], ARGV[6], ARGV[5])
return 1
