-- Ends leases whose jobs are stored, where results are on another server than the leases.
-- include result.lua
--
-- KEYS[1]  HASH  lease:<worker>, of the broker's database; see commit.lua.
-- ARGV     the tokens with spaces between
redis.call('HDEL', KEYS[1], unpack(words(ARGV[1])))
