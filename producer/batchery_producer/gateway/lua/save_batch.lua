-- Saves what has become of a batch, unless somebody else has, and makes files known.
--
-- KEYS[1]  HASH: the batch
-- KEYS[2]  HASH: files of its owner
-- KEYS[3]  ZSET: what is to be removed, by when
-- ARGV[1]  version that the record was read with
-- ARGV[2]  the record, of the next version
-- ARGV[..] files, four arguments for each: id, record, member of the removals, when it expires
--
-- Returns 1; 0 if it has another version, or a file was removed meanwhile.

-- include files.lua
if redis.call("HGET", KEYS[1], "version") ~= ARGV[1] then
  return 0
end
for place = 3, #ARGV, 4 do
  if redis.call("HEXISTS", KEYS[2], ARGV[place]) == 0 then
    return 0
  end
end
redis.call("HSET", KEYS[1], "record", ARGV[2])
redis.call("HINCRBY", KEYS[1], "version", 1)
for place = 3, #ARGV, 4 do
  publish(KEYS[2], KEYS[3], ARGV[place], ARGV[place + 1], ARGV[place + 2], ARGV[place + 3])
end
return 1
