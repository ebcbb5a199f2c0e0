-- Keeps a new batch, unless its owner has as many open ones as may be.
--
-- KEYS[1]  HASH: the batch
-- KEYS[2]  ZSET: ids of the owner's batches
-- KEYS[3]  SET: ids of the owner's batches that are open
-- KEYS[4]  ZSET: all batches that are open, by when they are taken up without a sign of life
-- ARGV[1]  maximum number of open batches
-- ARGV[2]  its id
-- ARGV[3]  its record, of version 0
-- ARGV[4]  its member of the open ones
-- ARGV[5]  when it is taken up, in Unix seconds
--
-- Returns 1, or 0 if there are too many.

if redis.call("SCARD", KEYS[3]) >= tonumber(ARGV[1]) then
  return 0
end
redis.call("HSET", KEYS[1], "record", ARGV[3], "version", 0)
redis.call("ZADD", KEYS[2], 0, ARGV[2])
redis.call("SADD", KEYS[3], ARGV[2])
redis.call("ZADD", KEYS[4], ARGV[5], ARGV[4])
return 1
