-- Acknowledges jobs whose completion has published messages, and removes their dedupe keys.
--
-- KEYS[1]   HASH  lease:<worker>, see fetch.lua
-- KEYS[2..] SET   sent:<publish tag>, see publish_once.lua; one for each token
-- ARGV      tokens
--
-- A job whose lease is gone runs again elsewhere, where its dedupe keys are needed.
for i, token in ipairs(ARGV) do
  if redis.call('HDEL', KEYS[1], token) == 1 then
    redis.call('DEL', KEYS[i + 1])
  end
end
return 1
