-- Puts a message into a queue, unless the same job has sent it before.
--
-- KEYS[1]  SET   sent:<publish tag>: marks of the messages that the completion of one job has sent.
--                Written here; removed by complete.lua with the acknowledgement of the job's
--                message, else it expires.
-- KEYS[2]  LIST  a queue, or one of its priority steps
-- KEYS[3]  HASH  lease:<worker>, see drain.lua; may be missing, as may be the token
-- ARGV     mark, seconds until the marks expire, message, token of the job's lease
-- Returns  1 if it was sent, 0 if it had been, -1 if somebody else has the job by now.
--
-- Whoever was stopped in the middle of a completion comes back when the job is done elsewhere, and its
-- marks are gone.
if KEYS[3] and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then
  return -1
end
-- The message first: where Redis refuses it, no mark must be left.
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then
  return 0
end
redis.call('LPUSH', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
