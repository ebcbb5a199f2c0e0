-- Ends a worker: gives all that it held back to the queues, marked as redelivered, in the original
-- order.
-- include redelivered.lua
--
-- KEYS[1]  ZSET  workers, see register.lua
-- KEYS[2]  HASH  worker-info, see register.lua
-- KEYS[3]  HASH  lease:<worker>, see fetch.lua
-- KEYS[4]  HASH  running:<worker>: batch id -> "shared", "slots" or "alone", then token and task id of
--                each of its jobs, all joined by spaces, odd ids as in a URL. Written when a batch begins,
--                removed when it ends; expires a day after the last one began. And "delivery" -> "shared" or "alone", first and last token of the messages
--                that the worker reads: written by fetch.lua, and by the worker before it reads a
--                suspect; removed by the next fetch.
-- KEYS[5]  HASH  suspects: task id -> how often it ran alone in a worker that died. A job to which it
--                happened once, among others of its batch or in slots, has their number instead,
--                below zero: it may run in a half of them. And delivery:<task id> -> how often its worker died, or ended, while
--                it read this message alone. Written here, and by a worker that ends while it reads;
--                read after a fetch; a field goes when its job is settled. Expires a day after the
--                last death: a job may also be settled by a worker that knows nothing of it, or
--                whose note of it is lost. Where workers die each day, such fields would heap up, so
--                all of them go when there are more than MAX_SUSPECTS.
-- KEYS[6]  HASH  waiting, see fetch.lua
-- ARGV     worker id; the heartbeat that its observer saw, or nothing for a worker that ends itself;
--          1 if deaths count
-- Returns  how many messages went back, and how many of them are suspects; nil if the worker has
--          sent another heartbeat since. An error, with nothing done, if not all of them can go back.

local MAX_SUSPECTS = 100000

-- The id in the headers of a leased message, spelled like those in the notes; nil if it has none.
local function id_of(token)
  local value = redis.call('HGET', KEYS[3], token)
  local cut = string.find(value, '\0', 1, true)
  local is_read, message = pcall(cjson.decode, string.sub(value, cut + 1))
  local headers = is_read and type(message) == 'table' and message.headers
  local id = type(headers) == 'table' and headers.id
  if type(id) ~= 'string' then
    return nil
  end
  return (string.gsub(id, '[^%w_.~/-]', function(c)
    return string.format('%%%02X', string.byte(c))
  end))
end

if ARGV[2] ~= '' and redis.call('ZSCORE', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return false
end
for _, value in ipairs(redis.call('HVALS', KEYS[3])) do
  local reason = why_not(value)
  if reason then
    return redis.error_reply(reason)
  end
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[6], ARGV[1])
if redis.call('HLEN', KEYS[5]) > MAX_SUSPECTS then
  redis.call('DEL', KEYS[5])
end
local suspects, delivery = 0, redis.call('HGET', KEYS[4], 'delivery')
redis.call('HDEL', KEYS[4], 'delivery')
if ARGV[3] == '1' then
  local running, noted, in_slots = redis.call('HVALS', KEYS[4]), {}, 0
  for _, batch in ipairs(running) do
    in_slots = in_slots + (string.sub(batch, 1, 6) == 'slots ' and 1 or 0)
  end
  for _, batch in ipairs(running) do
    -- With a second one beside it on another device, it may be innocent.
    local alone = #running == 1 and string.sub(batch, 1, 6) == 'alone '
    local ids = {}
    for token, id in string.gmatch(batch, ' (%d+) (%S+)') do
      noted[token] = true
      if redis.call('HEXISTS', KEYS[3], token) == 1 then
        ids[#ids + 1] = id
      end
    end
    suspects = suspects + #ids
    local group = string.sub(batch, 1, 6) == 'slots ' and in_slots or #ids
    for _, id in ipairs(ids) do
      local known = tonumber(redis.call('HGET', KEYS[5], id))
      local deaths = math.max(known or 0, 0)
      if alone then
        deaths = deaths + 1
      elseif not known and group > 1 then
        deaths = -group
      end
      redis.call('HSET', KEYS[5], id, deaths)
    end
  end
  local kind, first, last = string.match(delivery or '', '^(%a+) (%d+) (%d+)$')
  for token = tonumber(first or 1), tonumber(last or 0) do
    token = string.format('%.0f', token)
    local is_read_alone = kind == 'alone'
    if redis.call('HEXISTS', KEYS[3], token) == 1 and (is_read_alone or not noted[token]) then
      local id = id_of(token)
      if id then
        redis.call('HINCRBY', KEYS[5], 'delivery:' .. id, is_read_alone and 1 or 0)
      end
    end
  end
end
redis.call('EXPIRE', KEYS[5], 86400)
local tokens = redis.call('HKEYS', KEYS[3])
table.sort(tokens, function(a, b) return tonumber(a) > tonumber(b) end)
for _, token in ipairs(tokens) do
  -- The oldest is pushed last, to the end that is popped first.
  give_back(KEYS[3], token, 'RPUSH')
end
redis.call('DEL', KEYS[3], KEYS[4])
return {#tokens, suspects}
