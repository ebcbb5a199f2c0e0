-- Gives messages whose time has come to the front of their queues.
--
-- KEYS[..]  ZSET  <prefix><queue>~later, see postpone.lua
-- ARGV      how many seconds before their time they go back; how many of each queue at most
--
-- ZREM first: at maxmemory a script may write once it has deleted something. A key of another type
-- must not stop the script, as what was removed would be lost: pcall. A message whose queue is of
-- another type is tried again a minute later; what is no message is dropped.
local time = redis.call('TIME')
local until_s = time[1] + time[2] / 1e6 + ARGV[1]
for _, later in ipairs(KEYS) do
  local due = redis.pcall('ZRANGEBYSCORE', later, '-inf', until_s, 'LIMIT', 0, ARGV[2])
  for i = due.err and 0 or #due, 1, -1 do
    local cut = string.find(due[i], '\0', 1, true)
    redis.call('ZREM', later, due[i])
    if cut then
      local key, message = string.sub(due[i], 1, cut - 1), string.sub(due[i], cut + 1)
      local pushed = redis.pcall('RPUSH', key, message)
      if type(pushed) == 'table' then
        redis.call('ZADD', later, until_s + 60, due[i])
      end
    end
  end
end
return 1
