-- Moves waiting messages from their queues into the leases of one worker; or notes that the worker
-- waits for some.
-- include tenants.lua
--
-- KEYS[1]   ZSET    workers, see register.lua; a worker that is not in it gets nothing
-- KEYS[2]   HASH    lease:<worker>: token -> queue key, a zero byte, message as it was in the queue.
--                   Written here; a field goes with commit, acknowledgement, release or recovery.
-- KEYS[3]   STRING  token: the last token given; never expires, as tokens must not come twice
-- KEYS[4]   HASH    suspects, see recover.lua
-- KEYS[5]   HASH    waiting: worker id -> [batch jobs, ordinary jobs, {queue key: kinds}] in JSON: how many
--                   it could begin at once, and where it found nothing. The key is that of the
--                   queue's first step; kinds is 1 for batch jobs, 2 for ordinary ones, 3 for both.
--                   Written here; read by workers that hold jobs which they cannot begin. A field
--                   goes when its worker takes something, or could begin nothing; with release or
--                   recovery.
-- KEYS[6]   HASH    running:<worker>, see recover.lua
-- KEYS[7]   HASH    tenants, see tenants.lua
-- KEYS[8..] LIST    the lists of queues, in the order in which they are served: those of one priority step,
--                   then those of the next. Written by producers, read by every worker.
-- ARGV      worker id, messages wanted, bytes wanted, the entry in `waiting` if all lists are empty, or nothing;
--           number of parts, which are lists of one queue and priority class; for each part how many messages
--           it may give; then for each list the number of its part
-- Returns   {number of suspects, first token, index of queue key, message, index, message, ...}, and at the end
--           the key of a list that is not all sorted by tenant, if there is one;
--           {} if all lists are empty; nil if the worker is fenced.
--
-- At maxmemory a script may write once it has popped, which frees memory, so pops come first.
-- A key of another type than list must not stop the script, as what was popped would be lost: pcall.
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return false
end
local wanted, room, parts = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local left = {}
for part = 1, parts do
  left[part] = tonumber(ARGV[5 + part])
end
local answer, fields, unsorted = {0, 0}, {}, nil
local are_some_sorted = redis.call('EXISTS', KEYS[7]) == 1

-- Sorts some of a list by tenant; returns whether all of it is sorted now.
local function sort_some(list)
  local is_sorted = sort(KEYS[7], list) == 0
  unsorted = is_sorted and unsorted or not is_sorted and list
  return is_sorted
end

for i = 8, #KEYS do
  local part = tonumber(ARGV[parts + i - 2])
  local asked, got
  local sorted = are_some_sorted and redis.call('HGET', KEYS[7], KEYS[i])
  local length = sorted and redis.pcall('LLEN', KEYS[i])
  local is_sorted, tenant
  if sorted and type(length) == 'number' and wanted > 0 and left[part] > 0 and room > 0 then
    if sorted ~= '0' or length > math.min(wanted, left[part]) then
      is_sorted = sort_some(KEYS[i])
    end
  end
  repeat
    -- A few at a time: their size is known only afterwards.
    asked = math.min(wanted, left[part], 16)
    got = 0
    if asked > 0 and room > 0 then
      local messages
      if is_sorted ~= nil then
        messages = take(KEYS[7], KEYS[i], asked, is_sorted)
      else
        messages = redis.pcall('RPOP', KEYS[i], asked)
      end
      if messages and not messages.err then
        for _, message in ipairs(messages) do
          answer[#answer + 1] = i - 8
          answer[#answer + 1] = message
          fields[#fields + 1] = KEYS[i] .. '\0' .. message
          room = room - #message
        end
        got = #messages
        wanted = wanted - got
        left[part] = left[part] - got
        if not sorted and got == asked then
          -- Only where more waits than is taken does it matter who goes first.
          tenant = tenant or only_tenant(redis.call('LRANGE', KEYS[i], 0, 3))
          tenant = tenant ~= false and only_tenant(messages, tenant)
          if tenant == false then
            redis.call('HSET', KEYS[7], KEYS[i], 0)
            sorted = '0'
            -- The rest goes by turns already: whoever has few jobs does not wait behind all of it.
            is_sorted = sort_some(KEYS[i])
          end
        end
      end
    end
  until got == 0 or got < asked
  if is_sorted then
    put_forward(KEYS[7], KEYS[i])
  end
end
-- What was brought before has been handed over by now.
redis.call('HDEL', KEYS[6], 'delivery')
local entry = ARGV[4]
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
if unsorted then
  answer[#answer + 1] = unsorted
end
return answer
