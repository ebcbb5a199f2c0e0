-- Acknowledges jobs whose completion has sent messages, and removes the marks of these.
--
-- KEYS[1]   HASH  lease:<worker>, see drain.lua
-- KEYS[2..] SET   sent:<publish tag>, see send.lua; one for each token
-- ARGV      tokens
--
-- A job whose lease is gone runs again elsewhere, where its marks are needed.
for i, token in ipairs(ARGV) do
  if redis.call('HDEL', KEYS[1], token) == 1 then
    redis.call('DEL', KEYS[i + 1])
  end
end
return 1
