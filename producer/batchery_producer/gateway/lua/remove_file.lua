-- Forgets a file whose content was removed.
--
-- KEYS[1]  HASH: files of an owner
-- KEYS[2]  ZSET: what is to be removed, by when
-- ARGV[1]  id of the file
-- ARGV[2]  its member of the removals

local record = redis.call("HGET", KEYS[1], ARGV[1])
if record then
  redis.call("HINCRBY", KEYS[1], "bytes", -cjson.decode(record).bytes)
  redis.call("HDEL", KEYS[1], ARGV[1])
end
redis.call("ZREM", KEYS[2], ARGV[2])
