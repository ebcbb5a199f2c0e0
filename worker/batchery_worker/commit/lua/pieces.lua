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
-- besides   STRING  its <prefix>batchery-reader:<task id>. Made by who sends the job, its time to
--                   live is renewed by readers; goes when the sender gives the job up, or expires.
--           SET     its <prefix>batchery-woken:<task id>: wake streams of those who read the job.
--                   Made by them; goes when the result is stored, or expires as it does.
--           STREAM  each of these <prefix>batchery-wake:<id>: entries {k: keys of piece streams that
--                   have more, with line ends between}. Made by its reader; written here and by
--                   whoever stores a result; expires a minute after its reader has gone.
-- ARGV      worker id, number of the backend's database (empty in a cluster), number of the broker's
--           (empty if the leases are on another server), maximum pieces of a stream, milliseconds to
--           live that a reader key must have (empty where readers are not looked for),
--           <prefix>batchery-, the maximum of entries of a wake stream, and of readers of a job who are
--           woken; then with spaces between for each job: the tokens, the numbers of their first
--           pieces, and how many there are; then all pieces.
-- Returns   a digit for each job: 1 written, 0 fenced, 2 its readers have gone, 3 it has no stream.
--           Nil if this server does not know the worker: the broker is another one, or the worker is
--           fenced. In a cluster, where wake streams may be in any shard, a list: the digits, then for
--           each wake stream its key, and the keys of the piece streams with more, with line ends.
local worker, backend, broker = ARGV[1], ARGV[2], ARGV[3]
local workers, leases, most, least_ms = KEYS[1], KEYS[2], ARGV[4], tonumber(ARGV[5])
local begins, most_wakes, most_woken = ARGV[6], ARGV[7], ARGV[8]
local readers, wokens, wakes_begin = begins .. 'reader:', begins .. 'woken:', begins .. 'wake:'
local id_at = #begins + #'pieces:' + 1
local tokens, firsts, counts = words(ARGV[9]), words(ARGV[10]), words(ARGV[11])
local has_leases, count, held = broker ~= '', #KEYS - 2, {}
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

-- Keys of the piece streams that have more, by wake stream.
local wakes, has_shards = {}, backend == ''

local function wake(stream, woken)
  for _, key in ipairs(redis.pcall('SRANDMEMBER', woken, most_woken)) do
    -- Whoever sends jobs may have put any name there.
    if has_shards or string.sub(key, 1, #wakes_begin) == wakes_begin then
      wakes[key] = wakes[key] or {}
      table.insert(wakes[key], stream)
    end
  end
end

local answers, at = {}, 12
for i = 1, count do
  local stream = KEYS[2 + i]
  local id = string.sub(stream, id_at)
  local first, pieces = tonumber(firsts[i]), tonumber(counts[i])
  local left_ms = least_ms and redis.call('PTTL', readers .. id) or -1
  if has_leases and not held[i] then
    answers[i] = 0
  elseif least_ms and redis.call('EXISTS', stream) == 0 then
    answers[i] = 3
  elseif left_ms ~= -1 and left_ms < least_ms then
    answers[i] = 2
  else
    answers[i] = 1
    for n = 0, pieces - 1 do
      -- Redis refuses an id that is not above the last one: it has this piece already.
      local number, piece, added = (first + n) .. '-0', ARGV[at + n]
      -- Redis drops some hundred entries at a time, and each look costs a tenth of a piece.
      if (first + n) % 100 == 0 then
        added = redis.pcall('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', most, number, 'p', piece)
      else
        added = redis.pcall('XADD', stream, 'NOMKSTREAM', number, 'p', piece)
      end
      if not added then
        answers[i] = 3
        break
      end
    end
    if pieces > 0 and answers[i] == 1 then
      wake(stream, wokens .. id)
    end
  end
  at = at + pieces
end
local told = {table.concat(answers)}
for key, streams in pairs(wakes) do
  local keys = table.concat(streams, '\n')
  if has_shards then
    told[#told + 1], told[#told + 2] = key, keys
  else
    redis.pcall('XADD', key, 'NOMKSTREAM', 'MAXLEN', most_wakes, '*', 'k', keys)
  end
end
return has_shards and told or told[1]
