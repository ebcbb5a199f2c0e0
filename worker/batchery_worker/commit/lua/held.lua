-- Says which leases a worker holds, where results are on another server than the leases. It
-- changes nothing, but it counts as a write, so a replica does not answer.
-- include result.lua
--
-- KEYS[1]  ZSET  workers, of the broker's database; see commit.lua.
-- KEYS[2]  HASH  lease:<worker>, of the broker's database; see commit.lua.
-- ARGV     worker id, and the tokens with spaces between
-- Returns  a digit for each token: 1 held, 0 not. Nil if this server does not know the worker.
if not is_known(KEYS[1], KEYS[2], ARGV[1]) then
  return false
end
local held = {}
for i, token in ipairs(words(ARGV[2])) do
  held[i] = redis.call('HEXISTS', KEYS[2], token)
end
return table.concat(held)
