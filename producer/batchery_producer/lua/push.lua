-- Puts a chunk of messages into a queue once, however often it is sent, and no more than fit.
--
-- KEYS[1]   STRING  <prefix>batchery:publisher:<publisher id>: number of the last chunk that this
--                   publisher pushed, a space, number of messages pushed. Only this script uses it.
--                   It ends when the publisher closes, or some minutes after its last chunk.
-- KEYS[2]   LIST    one of a queue, for a priority and some tenants, see fetch.lua: messages, the
--                   newest on the left. Written by every producer, emptied by workers.
-- KEYS[3..] LIST    the queue's other lists that count, and are only counted; none without a limit
-- ARGV      number of the chunk, seconds until the first key expires, maximum number of messages
--           in the queue (0 is no limit), then the messages, in the order of delivery
-- Returns   {number of messages pushed, number of messages in the queue now (0 without a limit)}
--
-- The marker is written first: at maxmemory Redis refuses the first write of a script that needs
-- memory, so that nothing is done. If the push fails, the marker is taken back.
local chunk, limit = tonumber(ARGV[1]), tonumber(ARGV[3])
local seen = redis.call('GET', KEYS[1]) or ''

local length = 0
if limit > 0 then
  for i = 2, #KEYS do
    length = length + redis.call('LLEN', KEYS[i])
  end
end

local last, pushed = string.match(seen, '^(%d+) (%d+)$')
if last and tonumber(last) >= chunk then
  return {tonumber(pushed), length}
end

local count = #ARGV - 3
if limit > 0 then
  count = math.max(math.min(count, limit - length), 0)
end
if count == 0 then
  return {0, length}
end

redis.call('SET', KEYS[1], chunk .. ' ' .. count, 'EX', ARGV[2])
local first, final = 4, 3 + count
while first <= final do
  -- Lua's stack bounds what can be unpacked.
  local to = math.min(first + 999, final)
  local answer = redis.pcall('LPUSH', KEYS[2], unpack(ARGV, first, to))
  if type(answer) == 'table' and answer.err then
    redis.call('DEL', KEYS[1])
    return answer
  end
  first = to + 1
end
return {count, limit > 0 and length + count or 0}
