-- Appends pieces to the streams of jobs whose leases are held, and says which jobs nobody reads any
-- more. If the leases are on another server, held.lua has asked for them there.
-- include result.lua
--
-- KEYS[1]   ZSET    workers, of the broker's database; see commit.lua. Empty where there are no leases.
-- KEYS[2]   HASH    lease:<worker>, of the broker's database; see commit.lua.
-- KEYS[3..] STREAM  for each job <prefix>batchery-pieces:<task id>, of the result backend's database:
--                   entries {p: JSON} with the ids 1-0, 2-0... and at the end {end: ""}. Made by who
--                   sends the job, with an entry 0-1; written here and, at the job's end, by whoever
--                   stores its result; read by any number of readers; expires as the result does, and
--                   at most an hour after the end.
--           STRING  and its <prefix>batchery-reader:<task id>. Made by who sends the job, its time to
--                   live is renewed by readers; goes when the sender gives the job up, or expires.
--           SET     and its <prefix>batchery-woken:<task id>: wake streams of those who read the job.
--                   Made by them; goes when the result is stored, or expires as it does.
-- and       STREAM  each of these <prefix>batchery-wake:<id>: entries {key of a piece stream: JSON of
--                   the number of a piece, it, and those after it; or empty if that is too large, or
--                   the end}. Made by its reader; written here and by whoever stores a result;
--                   expires a minute after its reader has gone.
-- ARGV      worker id, number of the backend's database, number of the broker's (empty if the leases
--           are on another server), maximum pieces of a stream, milliseconds to live that a reader key
--           must have (empty where readers are not looked for), how names of wake streams begin,
--           the maximum of their entries, and of readers of a job who are woken; tokens with spaces
--           between; then for each job the number of its first piece, how many there are, and the
--           pieces.
-- Returns   a digit for each job: 1 written, 0 fenced, 2 its readers have gone, 3 it has no stream.
--           Nil if this server does not know the worker: the broker is another one, or the worker is
--           fenced.
local worker, backend, broker = ARGV[1], ARGV[2], ARGV[3]
local workers, leases, most, least_ms = KEYS[1], KEYS[2], ARGV[4], tonumber(ARGV[5])
local begins, most_wakes, most_woken = ARGV[6], ARGV[7], ARGV[8]
local has_leases, tokens = broker ~= '', words(ARGV[9])
local count, held = (#KEYS - 2) / 3, {}
if has_leases then
  if not use(broker, backend) or not is_known(workers, leases, worker) then
    return false
  end
  for i = 1, count do
    held[i] = redis.call('HEXISTS', leases, tokens[i]) == 1
  end
  use(backend, broker)
else
  begin_to_write(leases)
end

-- Entries of wake streams, and bytes of their pieces. Readers fetch larger ones where they are.
local wakes, bytes, most_bytes = {}, 0, 65536

local function wake(stream, woken, text)
  if bytes + #text > most_bytes then
    text = ''
  end
  bytes = bytes + #text
  for _, key in ipairs(redis.pcall('SRANDMEMBER', woken, most_woken)) do
    -- Whoever sends jobs may have put any name there.
    if string.sub(key, 1, #begins) == begins then
      local entry = wakes[key] or {}
      wakes[key] = entry
      entry[#entry + 1] = stream
      entry[#entry + 1] = text
    end
  end
end

local answers, at = {}, 10
for i = 1, count do
  local stream, reader, woken = KEYS[3 * i], KEYS[3 * i + 1], KEYS[3 * i + 2]
  local first, pieces = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local left_ms = least_ms and redis.call('PTTL', reader) or -1
  if has_leases and not held[i] then
    answers[i] = 0
  elseif least_ms and redis.call('EXISTS', stream) == 0 then
    answers[i] = 3
  elseif left_ms ~= -1 and left_ms < least_ms then
    answers[i] = 2
  else
    answers[i] = 1
    local is_new = true
    for n = 0, pieces - 1 do
      local id = string.format('%d-0', first + n)
      local piece = ARGV[at + 2 + n]
      local added = redis.pcall('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', most, id, 'p', piece)
      if not added then
        answers[i] = 3
        break
      end
      -- Redis refuses an id that is not above the last one: it has this piece already.
      is_new = is_new and type(added) == 'string'
    end
    if pieces > 0 and answers[i] == 1 then
      local text = is_new and table.concat(ARGV, ',', at + 2, at + 1 + pieces)
      wake(stream, woken, text and '[' .. first .. ',' .. text .. ']' or '')
    end
  end
  at = at + 2 + pieces
end
for key, entry in pairs(wakes) do
  redis.pcall('XADD', key, 'NOMKSTREAM', 'MAXLEN', most_wakes, '*', unpack(entry))
end
return table.concat(answers)
