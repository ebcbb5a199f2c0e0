-- Sorts what waits in a list by tenant; fetch.lua and sort_tenants.lua include this. No script itself.
--
-- A list in which a worker has seen jobs of two tenants is sorted from then on:
--
-- HASH  tenants: list key -> how many of its messages are in the lists of tenants. Written and read here.
--       A field stays, at 0, when the list is empty: it says that the list has tenants. With a zero byte behind
--       the key: "growing" while places are missing that were not yet made, "shared" where somebody who knows
--       nothing of places has taken some; goes when nothing is left.
-- ZSET  tenants:turns:<list key>: tenant -> the round in which its next message goes. The lowest goes first; a
--       tenant that comes begins in the present round. Goes when nothing is left.
-- LIST  tenants:of:<list key>, a zero byte, tenant: its messages, the newest on the left. Goes when empty.
--
-- In the list of the queue, a place stands for each message that was moved, so that LLEN counts all that wait:
-- newest messages, places, messages that go next; from left to right. To whoever knows of no places, one is
-- the message of a job that has expired: Celery discards it. So a place that is gone loses nothing, and comes again.
local PLACE = '{"body": "W1tdLCB7fSwge31d", "content-encoding": "utf-8", "content-type": "application/json",'
  .. ' "headers": {"task": "celery.accumulate", "id": "batchery-place", "expires": "2000-01-01T00:00:00+00:00",'
  .. ' "ignore_result": true}, "properties": {"delivery_info": {"exchange": "", "routing_key": ""},'
  .. ' "body_encoding": "base64", "delivery_tag": "batchery-place"}}'

-- Maximum number of messages that are sorted at once (of the newest ones above places, more), of their bytes, and of
-- places that are moved.
local MAX_SORTED, MAX_NEWEST, MAX_BYTES, MAX_PLACES = 1000, 2000, 4194304, 10000

-- How many messages stand before the places after each look, where plain workers share the queue.
local FORWARD = 32

-- The tenant in the headers of a message. A body is base64 or has its quotes escaped, so it cannot look like this.
-- With the first quote the search would take four times as long: it stops at each.
local function read_tenant(message)
  local _, name = string.find(message, 'batchery_tenant"', 1, true)
  return name and string.match(message, '^%s*:%s*"([^"]*)"', name + 1) or ''
end

local function turns_of(tenants, list)
  return tenants .. ':turns:' .. list
end

local function list_of(tenants, list, tenant)
  return tenants .. ':of:' .. list .. '\0' .. tenant
end

-- Pushes the same place, or many values, where Lua's stack bounds what can be unpacked.
local function push_all(key, values)
  for first = 1, #values, 1000 do
    redis.call('LPUSH', key, unpack(values, first, math.min(first + 999, #values)))
  end
end

-- The tenant of all messages; false if they have several, or one beside `known`, which may be nil.
local function only_tenant(messages, known)
  for _, message in ipairs(messages) do
    local tenant = read_tenant(message)
    if known and tenant ~= known then
      return false
    end
    known = tenant
  end
  return known
end

-- Moves messages to the lists of their tenants; they come oldest first.
local function move(tenants, list, messages)
  local by_tenant, turns = {}, turns_of(tenants, list)
  for _, message in ipairs(messages) do
    local tenant = string.sub(read_tenant(message), 1, 200)
    by_tenant[tenant] = by_tenant[tenant] or {}
    table.insert(by_tenant[tenant], message)
  end
  local round = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2] or 0
  for tenant, own in pairs(by_tenant) do
    push_all(list_of(tenants, list, tenant), own)
    redis.call('ZADD', turns, 'NX', round, tenant)
  end
  redis.call('HINCRBY', tenants, list, #messages)
end

-- Takes messages from the right end, oldest first, and drops places.
local function pop_oldest(list)
  local messages, bytes, places = {}, 0, 0
  while #messages < MAX_SORTED and bytes < MAX_BYTES and places < MAX_PLACES do
    local some = redis.call('RPOP', list, 16)
    if not some then
      break
    end
    for _, message in ipairs(some) do
      if message == PLACE then
        places = places + 1
      else
        messages[#messages + 1] = message
        bytes = bytes + #message
      end
    end
  end
  return messages
end

-- Takes the newest messages from the left end; nothing if they are too large to be sorted at once.
local function pop_newest(list, count)
  local newest_first, messages, bytes = {}, {}, 0
  while #newest_first < count do
    local some = redis.call('LPOP', list, math.min(16, count - #newest_first))
    for _, message in ipairs(some) do
      newest_first[#newest_first + 1] = message
      bytes = bytes + #message
    end
    if bytes > MAX_BYTES then
      count = 0
    end
  end
  for i = #newest_first, 1, -1 do
    messages[#messages + 1] = newest_first[i]
  end
  if count == 0 then
    push_all(list, messages)
    return {}
  end
  return messages
end

-- How many messages stand before the places, at the right end.
local function count_ahead(list)
  local count = 0
  while count < MAX_SORTED do
    local some = redis.call('LRANGE', list, -count - 16, -count - 1)
    for i = #some, 1, -1 do
      if some[i] == PLACE then
        return count
      end
      count = count + 1
    end
    if #some < 16 then
      break
    end
  end
  return count
end

-- Sorts some of what is not sorted; returns how much may be left, or how many places.
local function sort(tenants, list)
  -- At maxmemory a script may write once it has deleted something, and be it nothing.
  redis.call('HDEL', tenants, '')
  local sorted = tonumber(redis.call('HGET', tenants, list)) or 0
  local at = redis.call('LPOS', list, PLACE, 'MAXLEN', MAX_NEWEST + 1)
  local messages = {}
  if at and at > 0 then
    messages = pop_newest(list, at)
    at = #messages > 0 and 0
  end
  local had_places = at and sorted > 0
  if not at or sorted == 0 then
    -- More than can be sorted at once: the oldest first. Places come again when all is sorted.
    messages = pop_oldest(list)
    at = redis.call('LLEN', list) == 0 and 0
  end
  if #messages > 0 then
    move(tenants, list, messages)
  end
  local length = redis.call('LLEN', list)
  if not at then
    return length
  end
  local places, missing = {}, math.max(sorted + #messages - length + count_ahead(list), 0)
  for i = 1, math.min(missing, MAX_PLACES) do
    places[i] = PLACE
  end
  push_all(list, places)
  local state = redis.call('HGET', tenants, list .. '\0')
  if missing > #places then
    redis.call('HSET', tenants, list .. '\0', 'growing')
  elseif state == 'growing' then
    redis.call('HDEL', tenants, list .. '\0')
  elseif had_places and missing > #messages then
    redis.call('HSET', tenants, list .. '\0', 'shared')
  end
  return missing - #places
end

-- Takes messages in the order of their tenants' turns; `is_sorted` says that all that waits is sorted.
local function take(tenants, list, count, is_sorted)
  local taken, turns = {}, turns_of(tenants, list)
  if is_sorted then
    -- A place goes with each message; those in the list itself go before others.
    for _, message in ipairs(redis.call('RPOP', list, count) or {}) do
      if message ~= PLACE then
        taken[#taken + 1] = message
      end
    end
  end
  local given_back = #taken
  while #taken < count do
    local first = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
    if not first[1] then
      break
    end
    local round = first[2]
    for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', turns, round, round, 'LIMIT', 0, count - #taken)) do
      local message = redis.call('RPOP', list_of(tenants, list, tenant))
      if message then
        taken[#taken + 1] = message
        redis.call('ZINCRBY', turns, 1, tenant)
      else
        redis.call('ZREM', turns, tenant)
      end
    end
  end
  if #taken > given_back and redis.call('HINCRBY', tenants, list, given_back - #taken) == 0 then
    redis.call('DEL', turns)
    redis.call('HDEL', tenants, list .. '\0')
  end
  return taken
end

-- Puts the messages whose turn comes next into the list itself, in the stead of places, if somebody has taken places.
local function put_forward(tenants, list)
  if redis.call('HGET', tenants, list .. '\0') ~= 'shared' then
    return
  end
  local messages = take(tenants, list, FORWARD, true)
  for i = #messages, 1, -1 do
    redis.call('RPUSH', list, messages[i])
  end
end
