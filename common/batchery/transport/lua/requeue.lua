-- Gives leased messages back to their queues, marked as redelivered.
-- include redelivered.lua
--
-- KEYS[1]  HASH  lease:<worker>, see fetch.lua
-- ARGV     RPUSH (they are taken next) or LPUSH (after all others), then tokens in order of pushing
-- Returns  how many leases were still held.
local count = 0
for i = 2, #ARGV do
  if give_back(KEYS[1], ARGV[i], ARGV[1]) then
    count = count + 1
  end
end
return count
