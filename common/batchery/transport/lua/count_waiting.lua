-- Counts the messages that wait in a queue, and says since when the oldest does.
-- include sent_at.lua
-- include tenants.lua
--
-- KEYS[1]   HASH    tenants, see tenants.lua
-- KEYS[2..] LIST    lists of one queue and priority class: <prefix><queue>, with a priority
--                   <prefix><queue>\6\22<step>; messages, the newest on the left. Only read here.
-- Returns   {number of messages, when the oldest was sent, in Unix seconds, as text}; the text is
--           empty if no oldest message says so, as those of plain clients do not.
local count, oldest = 0, nil
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
    end
  end
end
return {count, oldest or ''}
