-- Makes a file known that was reserved; its bytes count as they are now.
local function publish(files, removals, id, record, member, expires_at)
  local reserved = cjson.decode(redis.call("HGET", files, id))
  redis.call("HINCRBY", files, "bytes", cjson.decode(record).bytes - reserved.bytes)
  redis.call("HSET", files, id, record)
  if expires_at == "" then
    redis.call("ZREM", removals, member)
  else
    redis.call("ZADD", removals, expires_at, member)
  end
end
