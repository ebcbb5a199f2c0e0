-- How requeue.lua, recover.lua, give_to_waiting.lua and requeue_dead_letters.lua give a message back;
-- they include this. No script itself.

-- Opens an object that is there already, as its first member: {"redelivered": true, ...
local MARK = '"redelivered": true'

-- Marks one object of a message; `start` is the position of its opening brace.
local function mark(message, start)
  local first = string.match(message, '^%s*(.)', start + 1)
  if not first or string.sub(message, start + 1, start + #MARK) == MARK then
    return message
  end
  local separator = first == '}' and '' or ', '
  return string.sub(message, 1, start) .. MARK .. separator .. string.sub(message, start + 1)
end

-- Marks a message as kombu marks what it gives back: in its headers, and in its delivery_info.
--
-- The message stays text: decoded and encoded by Redis, empty lists would become objects and large
-- numbers would lose digits. A quote within a JSON string is escaped, so a match is always a name.
-- Kombu writes properties last, and these end with what it added, so that the last match is the one.
local function redelivered(message)
  local last, brace = 0, 0
  while brace do
    last = brace
    brace = select(2, string.find(message, '"delivery_info"%s*:%s*{', last + 1))
  end
  if last > 0 then
    message = mark(message, last)
  end
  local _, headers = string.find(message, '"headers"%s*:%s*{')
  return headers and mark(message, headers) or message
end

-- Why nothing can be pushed to the queue of a leased message: its key is of another type, or this user
-- may not; nil if it can. Redis undoes nothing of a script that it stops.
local function why_not(value)
  local answer = redis.pcall('LLEN', string.sub(value, 1, string.find(value, '\0', 1, true) - 1))
  return type(answer) == 'table' and answer.err or nil
end

-- Moves a message from a worker's leases to its queue; marks it, unless it must stay as it is.
local function give_back(leases, token, side, unmarked)
  local value = redis.call('HGET', leases, token)
  if not value or why_not(value) then
    return false
  end
  local cut = string.find(value, '\0', 1, true)
  redis.call('HDEL', leases, token)
  local message = string.sub(value, cut + 1)
  redis.call(side, string.sub(value, 1, cut - 1), unmarked and message or redelivered(message))
  return true
end
