-- Moves leased messages beside their queues until their time comes, so that nobody holds them.
--
-- KEYS[1]   HASH  lease:<worker>, see fetch.lua
-- KEYS[2..] ZSET  <prefix><queue>~later, one for each token: queue key, a zero byte, message -> when its
--                 time comes, in Unix seconds of this server. Written here; return_due.lua takes out what
--                 is due; `celery purge` and queue_delete remove it.
-- ARGV      for each token: the token, and seconds until its time comes
--
-- HDEL first: at maxmemory a script may write once it has deleted something. Where a key is of another
-- type, the message stays leased: pcall.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
for i = 2, #KEYS do
  local token, delay = ARGV[2 * i - 3], ARGV[2 * i - 2]
  local value = redis.call('HGET', KEYS[1], token)
  if value then
    redis.call('HDEL', KEYS[1], token)
    local added = redis.pcall('ZADD', KEYS[i], now + delay, value)
    if type(added) == 'table' then
      redis.call('HSET', KEYS[1], token, value)
    end
  end
end
return 1
