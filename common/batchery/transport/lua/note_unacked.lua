-- Notes a message that kombu's own transport has taken, also while Redis is full: the first command
-- needs no memory, and lets the others of the script through.
--
-- KEYS[1]  HASH  unacked: kombu's, delivery tag -> message
-- KEYS[2]  ZSET  unacked_index: kombu's, delivery tag -> when it was taken
-- ARGV     delivery tag, message, Unix seconds
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
