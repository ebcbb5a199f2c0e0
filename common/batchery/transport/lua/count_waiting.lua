-- Counts the messages that wait in a queue, and says since when the oldest does.
--
-- KEYS[1..] LIST    lists of one queue and priority class: <prefix><queue>, with a priority
--                   <prefix><queue>\6\22<step>; messages, the newest on the left. Only read here.
-- Returns   {number of messages, when the oldest was sent, in Unix seconds, as text}; the text is
--           empty if no oldest message says so, as those of plain clients do not.
local count, oldest = 0, nil
for _, key in ipairs(KEYS) do
  local length = redis.call('LLEN', key)
  if length > 0 then
    count = count + length
    -- A body is base64 or has its quotes escaped, so only a header can look like this.
    local sent_at = string.match(redis.call('LINDEX', key, -1), '"batchery_sent_at": ([%d.]+)')
    if sent_at and (not oldest or tonumber(sent_at) < tonumber(oldest)) then
      oldest = sent_at
    end
  end
end
return {count, oldest or ''}
