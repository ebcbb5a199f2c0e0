-- Counts the messages that wait in a queue, and says since when the oldest does.
-- include sent_at.lua
--
-- KEYS[1..] LIST    lists of one queue and priority class: <prefix><queue>, those of its tenants
--                   <prefix><queue>\6\22t<n>, with a priority \6\22<step> behind that; messages, the newest on
--                   the left. Only read here.
-- Returns   {number of messages, when the oldest was sent, in Unix seconds, as text}; the text is
--           empty if none of those next in turn says so, as those of plain clients do not.
local count, oldest = 0, nil
for i = 1, #KEYS do
  local length = redis.call('LLEN', KEYS[i])
  if length > 0 then
    count = count + length
    local sent_at = sent_at_of(redis.call('LINDEX', KEYS[i], -1))
    if sent_at and (not oldest or tonumber(sent_at) < tonumber(oldest)) then
      oldest = sent_at
    end
  end
end
return {count, oldest or ''}
