-- Writes a note of the message that a worker reads, also at maxmemory.
--
-- KEYS[1]  HASH  running:<worker> or suspects, see recover.lua
-- ARGV     HSET or HINCRBY, its field and its value
--
-- HDEL first: at maxmemory a script may write once it has deleted something, and be it nothing.
redis.call('HDEL', KEYS[1], '')
redis.call(ARGV[1], KEYS[1], ARGV[2], ARGV[3])
