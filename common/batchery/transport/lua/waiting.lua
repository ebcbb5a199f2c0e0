-- Who waits for work; fetch.lua and give_to_waiting.lua include this. No script itself.

-- Calls a function with the entry of each worker that waits, but for one; see fetch.lua.
local function each_waiting(waiting, but, visit)
  local entries = redis.call('HGETALL', waiting)
  for i = 1, #entries, 2 do
    if entries[i] ~= but then
      visit(cjson.decode(entries[i + 1]))
    end
  end
end
