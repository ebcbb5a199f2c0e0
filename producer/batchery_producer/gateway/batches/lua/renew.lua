-- Renews the lease of a batch, unless somebody else has it.
--
-- KEYS[1]  STRING: token of the process that runs the batch
-- ARGV[1]  token
-- ARGV[2]  how long the lease holds, in milliseconds
--
-- Returns 1, or 0 if another process has the lease.

local holder = redis.call("GET", KEYS[1])
if holder and holder ~= ARGV[1] then
  return 0
end
-- A Redis that forgot it at a restart: whoever asks first within its time has it.
redis.call("SET", KEYS[1], ARGV[1], "PX", ARGV[2])
return 1
