-- Puts a message into a queue, unless the same job has published it before.
--
-- KEYS[1]  SET   sent:<publish tag>: dedupe keys of the messages that the completion of one job has
--                published. Written here; removed by ack_published.lua with the acknowledgement of
--                the job's message; otherwise it expires.
-- KEYS[2]  LIST  a queue, or one of its priority steps
-- KEYS[3]  HASH  lease:<worker>, see fetch.lua; optional, as is the token
-- ARGV     dedupe key, seconds until the dedupe keys expire, message, token of the job's lease
-- Returns  1 if it was published, 0 if it had been, -1 if another worker has the job by now.
--
-- The lease is checked because a worker that was stopped in the middle of a completion may continue
-- when the job is done elsewhere, and its dedupe keys are gone.
if KEYS[3] and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then
  return -1
end
-- The message goes first: if Redis refuses it, no dedupe key must be left.
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then
  return 0
end
redis.call('LPUSH', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
