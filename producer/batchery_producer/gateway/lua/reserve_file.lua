-- Reserves space for a file, whose record is hidden until it is published.
--
-- KEYS[1]  HASH: files of an owner; its field "bytes" is their sum
-- KEYS[2]  ZSET: what is to be removed, by when
-- ARGV[1]  id of the file
-- ARGV[2]  its record
-- ARGV[3]  its bytes
-- ARGV[4]  maximum bytes of all files; 0 for any bytes and any number
-- ARGV[5]  its member of the removals
-- ARGV[6]  when it is removed if it is not published by then
-- ARGV[7]  maximum number of files
--
-- Returns -1; or how many bytes are stored if there is no space, -2 if there are too many files.

local stored = tonumber(redis.call("HGET", KEYS[1], "bytes") or 0)
local most = tonumber(ARGV[4])
if most > 0 and stored + ARGV[3] > most then
  return stored
end
if most > 0 and redis.call("HLEN", KEYS[1]) > tonumber(ARGV[7]) then
  return -2
end
redis.call("HINCRBY", KEYS[1], "bytes", ARGV[3])
redis.call("HSET", KEYS[1], ARGV[1], ARGV[2])
redis.call("ZADD", KEYS[2], ARGV[6], ARGV[5])
return -1
