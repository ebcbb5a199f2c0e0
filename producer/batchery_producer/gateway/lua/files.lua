-- Makes a file known that was reserved.
local function publish(files, removals, id, record, member, expires_at)
  redis.call("HSET", files, id, record)
  if expires_at == "" then
    redis.call("ZREM", removals, member)
  else
    redis.call("ZADD", removals, expires_at, member)
  end
end
