-- Gives messages that were leased and not begun back to their queues, for other workers that wait
-- for work: as many as these can begin at once.
-- include redelivered.lua
--
-- KEYS[1]  HASH  lease:<worker>, see fetch.lua
-- KEYS[2]  HASH  waiting, see fetch.lua
-- ARGV     worker id, then for each message, oldest first: token, key of its queue's first step
-- Returns  the tokens of those that went back.
--
-- They go to the front of their queues, in order. They are not marked as redelivered: nobody has
-- begun them, so that whoever gets them has nothing to look at twice.
local entries, given = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #entries, 2 do
  local room, waits_for = unpack(cjson.decode(entries[i + 1]))
  local is_waited_for = {}
  for _, key in ipairs(waits_for) do
    is_waited_for[key] = true
  end
  for at = 2, entries[i] ~= ARGV[1] and #ARGV or 0, 2 do
    if not given[at] and room > 0 and is_waited_for[ARGV[at + 1]] then
      room, given[at] = room - 1, true
    end
  end
end
local gone = {}
for at = #ARGV - 1, 2, -2 do
  -- The oldest is pushed last, to the end that is popped first.
  if given[at] and give_back(KEYS[1], ARGV[at], 'RPUSH', true) then
    gone[#gone + 1] = ARGV[at]
  end
end
return gone
