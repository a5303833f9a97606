-- Renews the claim on a dead gateway and strikes what was released off its journal; at the end, forgets it.
--
-- KEYS[1]   claim: STRING, of the dead one
-- KEYS[2]   attempts: HASH, of the dead one
-- KEYS[3]   lives: ZSET, replica -> until
-- KEYS[4]   addresses: HASH, replica -> URL
-- ARGV[1]   the claim, as it was given
-- ARGV[2]   for how long it holds unless it is renewed, milliseconds
-- ARGV[3]   who is dead
-- ARGV[4]   1 when all is over, else 0; the mark stays, so that it finds it whenever it comes back
-- ARGV[5..] rids of attempts that were released
-- Returns   0 when the claim is not held any more, and then nothing is changed; else 1

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[4] == '1' then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('HDEL', KEYS[4], ARGV[3])
  return 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if #ARGV > 4 then
  redis.call('HDEL', KEYS[2], unpack(ARGV, 5, #ARGV))
end
return 1
