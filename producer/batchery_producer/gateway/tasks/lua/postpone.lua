-- Makes members of a sorted set of times due so much later from now; adds those that are missing.
-- KEYS[1]: the set: members by when they are due, in Unix seconds.
-- ARGV[1]: in how many seconds.
-- ARGV[2..]: the members.
local time = redis.call("TIME")
local due_s = time[1] + time[2] / 1000000 + ARGV[1]
for place = 2, #ARGV do
  redis.call("ZADD", KEYS[1], due_s, ARGV[place])
end
