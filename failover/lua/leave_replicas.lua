-- Forgets a gateway that stops: nothing of it is live any more.
--
-- KEYS[1]  lives: ZSET, replica -> until
-- KEYS[2]  addresses: HASH, replica -> URL
-- KEYS[3]  attempts: HASH, of this replica
-- ARGV[1]  replica
-- Returns  how much of it there was

redis.call('UNLINK', KEYS[3])
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('ZREM', KEYS[1], ARGV[1])
