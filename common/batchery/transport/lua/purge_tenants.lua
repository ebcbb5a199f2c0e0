-- Removes the messages of a queue that were sorted by tenant; its own lists are gone already.
-- include tenants.lua
--
-- KEYS[1]   HASH  tenants, see tenants.lua
-- KEYS[2..] LIST  the lists of the queue
for i = 2, #KEYS do
  local turns = turns_of(KEYS[1], KEYS[i])
  for _, tenant in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    redis.call('DEL', list_of(KEYS[1], KEYS[i], tenant))
  end
  redis.call('DEL', turns)
  redis.call('HDEL', KEYS[1], KEYS[i], KEYS[i] .. '\0')
end
return 1
