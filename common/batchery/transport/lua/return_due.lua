-- Gives messages whose time has come to the front of their queues.
--
-- KEYS[..]  ZSET  <prefix><queue>~later, see postpone.lua
-- ARGV      how many seconds before their time they go back; how many of each queue at most
--
-- ZREM first: at maxmemory a script may write once it has deleted something. A key of another type
-- must not stop the script: pcall.
local time = redis.call('TIME')
local until_s = time[1] + time[2] / 1e6 + ARGV[1]
for _, later in ipairs(KEYS) do
  local due = redis.pcall('ZRANGEBYSCORE', later, '-inf', until_s, 'LIMIT', 0, ARGV[2])
  if not due.err and #due > 0 then
    redis.call('ZREM', later, unpack(due))
    for i = #due, 1, -1 do
      local cut = string.find(due[i], '\0', 1, true)
      redis.call('RPUSH', string.sub(due[i], 1, cut - 1), string.sub(due[i], cut + 1))
    end
  end
end
return 1
