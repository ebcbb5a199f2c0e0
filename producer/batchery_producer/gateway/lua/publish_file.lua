-- Makes a file known that was reserved.
--
-- KEYS[1]  HASH: files of an owner
-- KEYS[2]  ZSET: what is to be removed, by when
-- ARGV[1]  id of the file
-- ARGV[2]  its record
-- ARGV[3]  its member of the removals
-- ARGV[4]  when it expires; empty for never
--
-- Returns 1, or 0 if it was removed meanwhile.

-- include files.lua
if redis.call("HEXISTS", KEYS[1], ARGV[1]) == 0 then
  return 0
end
publish(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return 1
