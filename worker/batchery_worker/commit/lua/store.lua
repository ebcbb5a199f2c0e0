-- Stores and announces results, or states on the way to them; each unless a SUCCESS is stored, and
-- STARTED unless any end of the job is.
-- include result.lua
--
-- KEYS     STRING  <prefix>celery-task-meta-<task id> of each job, of the result backend's database; see
--                  commit.lua.
-- then     HASH    lease:<worker>, of the broker's database; see commit.lua. Only with a token.
-- ARGV     number of the backend's database (empty in a cluster), of the broker's (empty without a token), token of a lease
--          without which nothing is stored (may be empty), seconds until they expire (0 for never),
--          then the value to store for each job
-- Returns  a digit for each job: 1 stored, 0 not, 2 unsure, with nothing done.
local backend, broker, token, expires_s = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local count, is_ours = #KEYS, true
if token ~= '' then
  count = count - 1
  if use(broker, backend) then
    is_ours = redis.call('HEXISTS', KEYS[#KEYS], token) == 1
    use(backend, broker)
  end
end

local answers = {}
for i = 1, count do
  local key, value = KEYS[i], ARGV[i + 4]
  local is_start = string.find(value, '^{%s*"status"%s*:%s*"STARTED"') ~= nil
  answers[i] = is_ours and may_write(key, false, is_start) or 0
  if answers[i] == 1 then
    write(key, value, expires_s, backend)
  end
end
return table.concat(answers)
