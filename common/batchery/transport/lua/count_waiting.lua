-- Counts the messages that wait in a queue, and says since when the oldest does.
-- include sent_at.lua
--
-- KEYS[1..] LIST    lists of one queue and priority class: <prefix><queue>, those of its tenants
--                   <prefix><queue>\6\22t<n>, with a priority \6\22<step> behind that; messages, the newest on
--                   the left. Only read here.
-- Returns   {number of messages, when the oldest was sent, in Unix seconds, as text, then the ids of
--           up to MAX_UNDATED oldest messages that do not say so, as those of plain clients do not};
--           the text is empty if none of them says so.
local MAX_UNDATED, MAX_ID = 100, 100
local count, oldest, undated = 0, nil, {}
for i = 1, #KEYS do
  local length = redis.call('LLEN', KEYS[i])
  if length > 0 then
    count = count + length
    local message = redis.call('LINDEX', KEYS[i], -1)
    local sent_at = sent_at_of(message)
    if sent_at and (not oldest or tonumber(sent_at) < tonumber(oldest)) then
      oldest = sent_at
    end
    if not sent_at and #undated < MAX_UNDATED then
      local id = string.match(message, '"correlation_id":%s*"([^"]+)"')
      undated[#undated + 1] = id and string.sub(id, 1, MAX_ID)
    end
  end
end
return {count, oldest or '', unpack(undated)}
