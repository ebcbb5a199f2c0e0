-- Stores and announces results, or states on the way to them; each unless a SUCCESS is stored, and
-- STARTED unless any end of the job is.
-- include result.lua
--
-- KEYS     STRING  <prefix>celery-task-meta-<task id> of each job, of the result backend's database; see
--                  commit.lua.
-- ARGV     seconds until they expire (0 for never), then the value to store for each job
-- Returns  a digit for each job: 1 stored, 0 not, 2 unsure, with nothing done.
local answers = {}
for i, key in ipairs(KEYS) do
  local is_start = string.find(ARGV[i + 1], '^{%s*"status"%s*:%s*"STARTED"') ~= nil
  answers[i] = may_write(key, false, is_start)
  if answers[i] == 1 then
    write(key, ARGV[i + 1], tonumber(ARGV[1]))
  end
end
return table.concat(answers)
