-- Counts the messages that a worker holds, and reads some of them for their queues and their age.
-- include sent_at.lua
--
-- KEYS[1]  HASH  lease:<worker>, see fetch.lua. Only read here.
-- Returns  {number of messages, then for each list whose messages were read: its key, how many of
--          them were, when the oldest of them was sent, as in count_waiting.lua}
--
-- A worker may hold very many messages, and large ones: so it reads a random sample of them all, those
-- taken first before others, and none for which there is no room.
local MAX_READ, MAX_BYTES = 100, 1048576

local tokens = redis.call('HRANDFIELD', KEYS[1], MAX_READ)
table.sort(tokens, function(a, b) return tonumber(a) < tonumber(b) end)
local answer, places, bytes = {redis.call('HLEN', KEYS[1])}, {}, 0

local function read(value)
  local key = string.sub(value, 1, string.find(value, '\0', 1, true) - 1)
  local place = places[key]
  if not place then
    place = #answer + 1
    places[key], answer[place], answer[place + 1], answer[place + 2] = place, key, 0, ''
  end
  answer[place + 1] = answer[place + 1] + 1
  local sent_at = tonumber(sent_at_of(value) or '')
  local oldest = tonumber(answer[place + 2])
  if sent_at and (not oldest or sent_at < oldest) then
    answer[place + 2] = string.format('%.6f', sent_at)
  end
end

for _, token in ipairs(tokens) do
  local size = redis.call('HSTRLEN', KEYS[1], token)
  if bytes + size <= MAX_BYTES then
    bytes = bytes + size
    read(redis.call('HGET', KEYS[1], token))
  end
end
return answer
