-- Counts the messages that wait in a queue, and says since when the oldest does.
-- include sent_at.lua
-- include tenants.lua
--
-- KEYS[1]   HASH    tenants, see tenants.lua
-- KEYS[2..] LIST    lists of one queue and priority class: <prefix><queue>, with a priority
--                   <prefix><queue>\6\22<step>; messages, the newest on the left. Only read here.
-- Returns   {number of messages, when the oldest was sent, in Unix seconds, as text, then the ids of
--           up to MAX_UNDATED oldest messages that do not say so, as those of plain clients do not};
--           the text is empty if none of them says so.
local MAX_UNDATED, MAX_ID = 100, 100
local count, oldest, undated = 0, nil, {}
for i = 2, #KEYS do
  local length = redis.call('LLEN', KEYS[i])
  if length > 0 then
    count = count + length
    local lists = {KEYS[i]}
    for _, tenant in ipairs(redis.call('ZRANGE', turns_of(KEYS[1], KEYS[i]), 0, 99)) do
      lists[#lists + 1] = list_of(KEYS[1], KEYS[i], tenant)
    end
    for _, list in ipairs(lists) do
      local message = redis.call('LINDEX', list, -1)
      local sent_at = message and sent_at_of(message)
      if sent_at and (not oldest or tonumber(sent_at) < tonumber(oldest)) then
        oldest = sent_at
      end
      if message and not sent_at and #undated < MAX_UNDATED then
        local id = string.match(message, '"correlation_id":%s*"([^"]+)"')
        undated[#undated + 1] = id and string.sub(id, 1, MAX_ID)
      end
    end
  end
end
return {count, oldest or '', unpack(undated)}
