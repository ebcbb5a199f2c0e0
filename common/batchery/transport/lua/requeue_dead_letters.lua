-- Puts dead letters back into their queues, behind the messages that wait there, marked as
-- redelivered.
-- include redelivered.lua
--
-- KEYS[1]   HASH  dead, see dead_letter.lua
-- KEYS[2]   HASH  dead-messages, see dead_letter.lua
-- ARGV      tokens in order of pushing
-- Returns   the tokens of those that were there.
local revived = {}
for _, token in ipairs(ARGV) do
  local value = redis.call('HGET', KEYS[2], token)
  if value and not why_not(value) then
    local cut = string.find(value, '\0', 1, true)
    redis.call('HDEL', KEYS[1], token)
    redis.call('HDEL', KEYS[2], token)
    redis.call('LPUSH', string.sub(value, 1, cut - 1), redelivered(string.sub(value, cut + 1)))
    revived[#revived + 1] = token
  end
end
return revived
