-- Stores and announces a result, unless a SUCCESS is stored.
-- include result.lua
--
-- KEYS[1]  STRING  <prefix>celery-task-meta-<task id>, of the result backend's database; see commit.lua.
-- ARGV     the value to store, seconds until it expires (0 for never)
-- Returns  1 stored, 0 not, 2 unsure, with nothing done.
local may = may_write(KEYS[1])
if may == 1 then
  write(KEYS[1], ARGV[1], tonumber(ARGV[2]))
end
return may
