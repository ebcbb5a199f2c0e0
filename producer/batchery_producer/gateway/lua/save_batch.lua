-- Saves what has become of a batch, if this attempt still has its turn, and makes files known.
--
-- KEYS[1]  HASH: the batch
-- KEYS[2]  ZSET: work by when it is due, in Unix seconds
-- KEYS[3]  LIST: pieces of the batch
-- KEYS[4]  HASH: files of its owner
-- KEYS[5]  ZSET: what is to be removed, by when
-- ARGV[1]  token of the attempt
-- ARGV[2]  its work
-- ARGV[3]  when that is due again
-- ARGV[4]  the record; empty to leave it
-- ARGV[5]  number of the turn from now on
-- ARGV[6]  number of new pieces; they follow
-- ARGV[..] files, four arguments for each: id, record, member of the removals, when it expires
--
-- Returns 1; 0 if another attempt has the turn, or a file was removed meanwhile.

-- include files.lua
if redis.call("HGET", KEYS[1], "attempt") ~= ARGV[1] then
  return 0
end
local first_file = 7 + tonumber(ARGV[6])
for place = first_file, #ARGV, 4 do
  if redis.call("HEXISTS", KEYS[4], ARGV[place]) == 0 then
    return 0
  end
end
redis.call("ZADD", KEYS[2], ARGV[3], ARGV[2])
if ARGV[4] ~= "" then
  redis.call("HSET", KEYS[1], "record", ARGV[4], "turn", ARGV[5])
end
for place = 7, first_file - 1 do
  -- It may be there, if the answer to an earlier call was lost.
  redis.call("LREM", KEYS[3], -1, ARGV[place])
  redis.call("RPUSH", KEYS[3], ARGV[place])
end
for place = first_file, #ARGV, 4 do
  publish(KEYS[4], KEYS[5], ARGV[place], ARGV[place + 1], ARGV[place + 2], ARGV[place + 3])
end
return 1
