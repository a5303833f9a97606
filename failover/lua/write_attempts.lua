-- Writes what changed among the live attempts of one gateway into its journal.
--
-- KEYS[1]   attempts: HASH, rid -> servers
-- KEYS[2]   reaped: STRING, of this replica
-- ARGV[1]   1 when nothing of what is written there is to stay, else 0
-- ARGV[2]   for how long the journal is kept if nothing more is written, milliseconds
-- ARGV[3]   how many attempts are over
-- ARGV[4..] their rids; then rid, servers, and so on, of those that began
-- Returns   0 when this replica was declared dead, and then nothing is changed; else 1

if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
if ARGV[1] == '1' then
  redis.call('UNLINK', KEYS[1])
end
local over = tonumber(ARGV[3])
if over > 0 then
  redis.call('HDEL', KEYS[1], unpack(ARGV, 4, 3 + over))
end
if #ARGV > 3 + over then
  redis.call('HSET', KEYS[1], unpack(ARGV, 4 + over, #ARGV))
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
