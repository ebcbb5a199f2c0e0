-- Stores and announces that jobs have begun, each unless a SUCCESS is stored.
-- include result.lua
--
-- KEYS     STRING  <prefix>celery-task-meta-<task id> of each job; see commit.lua.
-- ARGV     seconds until they expire (0 for never), then the value of each job
-- Returns  nil
for i, key in ipairs(KEYS) do
  if may_write(key) == 1 then
    write(key, ARGV[i + 1], tonumber(ARGV[1]))
  end
end
