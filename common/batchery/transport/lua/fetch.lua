-- Moves waiting messages from their queues into the leases of one worker; or notes that the worker
-- waits for some.
--
-- KEYS[1]   ZSET    workers, see register.lua; a worker that is not in it gets nothing
-- KEYS[2]   HASH    lease:<worker>: token -> queue key, a zero byte, message as it was in the queue.
--                   Written here; a field goes with commit, acknowledgement, release or recovery.
-- KEYS[3]   STRING  token: the last token given; never expires, as tokens must not come twice
-- KEYS[4]   HASH    suspects, see recover.lua
-- KEYS[5]   HASH    waiting: worker id -> [jobs, [queue key, ...]] in JSON: how many it could begin at
--                   once, and where it found nothing. The key is that of the queue's first step.
--                   Written here; read by workers that hold jobs which they cannot begin. A field
--                   goes when its worker takes something, or could begin nothing; with release or
--                   recovery.
-- KEYS[6]   HASH    running:<worker>, see recover.lua
-- KEYS[7..] LIST    queues in the order in which they are served: those of one priority step, then those of
--                   the next; then for each of them, in the same order, its lists of tenants. Written by
--                   producers, read by every worker.
-- ARGV      worker id, bytes wanted, the entry in `waiting` if all lists are empty, or nothing;
--           number of parts, which are lists of one queue and priority class; for each part how many messages
--           it may give; then for each queue and step the number of its part
-- Returns   {number of suspects, first token, index of queue key, message, index, message, ...};
--           {} if all lists are empty; nil if the worker is fenced.
--
-- At maxmemory a script may write once it has popped, which frees memory, so pops come first.
-- A key of another type than list must not stop the script, as what was popped would be lost: pcall.
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return false
end
local room, parts = tonumber(ARGV[2]), tonumber(ARGV[4])
local left = {}
for part = 1, parts do
  left[part] = tonumber(ARGV[4 + part])
end
local answer, fields = {0, 0}, {}
local queues = #ARGV - 4 - parts
-- How many lists a queue and priority step has for its tenants.
local own_lists = (#KEYS - 6) / queues - 1
local are_tenants = false
for first = 7 + queues, #KEYS, 4000 do
  -- Lua's stack bounds what can be unpacked.
  local some = redis.call('EXISTS', unpack(KEYS, first, math.min(first + 3999, #KEYS)))
  are_tenants = are_tenants or some > 0
end

-- The numbers of the lists of a queue's priority step that have messages.
local function find_lists(at)
  local found = {6 + at}
  if not are_tenants then
    return found
  end
  local first = 7 + queues + (at - 1) * own_lists
  for i = first, first + own_lists - 1 do
    if redis.call('EXISTS', KEYS[i]) == 1 then
      found[#found + 1] = i
    end
  end
  if #found > 1 and redis.call('EXISTS', KEYS[6 + at]) == 0 then
    table.remove(found, 1)
  end
  return found
end

for at = 1, queues do
  local part = tonumber(ARGV[4 + parts + at])
  local total = left[part]
  local lists = total > 0 and room > 0 and find_lists(at) or {}
  local turn, share = 1, total
  if #lists > 1 then
    -- Where fewer are wanted than there are lists, each must come to its turn. Multiples of this number
    -- modulo 1 are spread evenly, also if only each second token, or each tenth, counts here.
    local spread = tonumber(redis.call('GET', KEYS[3]) or 0) * 0.6180339887498949 % 1
    turn, share = 1 + math.floor(spread * #lists), math.max(1, math.floor(total / #lists))
  end
  while #lists > 0 and room > 0 do
    -- A few at a time: their size is known only afterwards.
    local asked = math.min(left[part], share, 16)
    if asked == 0 then
      break
    end
    local i = lists[turn]
    local messages = redis.pcall('RPOP', KEYS[i], asked)
    local got = 0
    if messages and not messages.err then
      got = #messages
      for _, message in ipairs(messages) do
        answer[#answer + 1] = i - 7
        answer[#answer + 1] = message
        fields[#fields + 1] = KEYS[i] .. '\0' .. message
        room = room - #message
      end
      left[part] = left[part] - got
    end
    if got == asked then
      turn = turn + 1
    else
      table.remove(lists, turn)
    end
    turn = turn > #lists and 1 or turn
  end
end
-- What was brought before has been handed over by now.
redis.call('HDEL', KEYS[6], 'delivery')
local entry = ARGV[3]
if #fields > 0 or entry == '' then
  redis.call('HDEL', KEYS[5], ARGV[1])
elseif redis.call('HGET', KEYS[5], ARGV[1]) ~= entry then
  -- HDEL first: at maxmemory a script may write once it has deleted something, and be it nothing.
  redis.call('HDEL', KEYS[5], ARGV[1])
  redis.call('HSET', KEYS[5], ARGV[1], entry)
end
if #fields == 0 then
  return {}
end
answer[2] = redis.call('INCRBY', KEYS[3], #fields) - #fields + 1
answer[1] = redis.call('HLEN', KEYS[4])
local slice = {}
for i, field in ipairs(fields) do
  slice[#slice + 1] = answer[2] + i - 1
  slice[#slice + 1] = field
  -- Lua's stack bounds what can be unpacked.
  if #slice == 1000 or i == #fields then
    redis.call('HSET', KEYS[2], unpack(slice))
    slice = {}
  end
end
redis.call('HSET', KEYS[6], 'delivery', 'shared ' .. answer[2] .. ' ' .. answer[2] + #fields - 1)
return answer
