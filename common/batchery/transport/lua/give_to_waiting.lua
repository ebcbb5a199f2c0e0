-- Gives messages that were leased and not begun back to their queues, for other workers that wait
-- for work: as many as these can begin at once.
-- include redelivered.lua
-- include waiting.lua
--
-- KEYS[1]   HASH  lease:<worker>, see fetch.lua
-- KEYS[2]   HASH  waiting, see fetch.lua
-- KEYS[3..] LIST  queues, in the order of fetch.lua
-- ARGV      worker id, number of queues, then for each message, oldest first: token, number of its
--           queue, 1 for the job of a batch task or 2 for an ordinary one
-- Returns   the tokens of those that went back.
--
-- They go to the front of their queues, in order. They are not marked as redelivered: nobody has
-- begun them, so that whoever gets them has nothing to look at twice.
local queues = tonumber(ARGV[2])
local waiters = {}
each_waiting(KEYS[2], ARGV[1], function(entry)
  waiters[#waiters + 1] = {entry[1], entry[2], kinds = entry[3]}
end)
if #waiters == 0 then
  return {}
end
-- What is in a queue already is for those that wait for it.
for queue = 1, queues do
  local there = 0
  for i = 2 + queue, #KEYS, queues do
    there = there + (tonumber(redis.pcall('LLEN', KEYS[i])) or 0)
  end
  for _, waiter in ipairs(waiters) do
    if waiter.kinds[KEYS[2 + queue]] then
      local taken = math.min(there, math.max(waiter[1], waiter[2]))
      waiter[1], waiter[2] = waiter[1] - taken, waiter[2] - taken
      there = there - taken
    end
  end
end
local given = {}
for i = 3, #ARGV, 3 do
  local key, kind = KEYS[2 + tonumber(ARGV[i + 1])], tonumber(ARGV[i + 2])
  for _, waiter in ipairs(waiters) do
    local kinds = waiter.kinds[key]
    if waiter[kind] > 0 and (kinds == kind or kinds == 3) then
      waiter[kind] = waiter[kind] - 1
      given[#given + 1] = ARGV[i]
      break
    end
  end
end
local gone = {}
for i = #given, 1, -1 do
  -- The oldest is pushed last, to the end that is popped first.
  if give_back(KEYS[1], given[i], 'RPUSH', true) then
    gone[#gone + 1] = given[i]
  end
end
return gone
