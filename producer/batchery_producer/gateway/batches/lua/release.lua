-- Gives the lease of a batch back.
--
-- KEYS[1]  STRING: token of the process that runs the batch
-- ARGV[1]  token
--
-- Returns 1, or 0 if another process has the lease.

if redis.call("GET", KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call("DEL", KEYS[1])
return 1
