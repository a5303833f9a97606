-- Gives leases of one gateway back, so that others may take them at once.
--
-- KEYS[1]   leases: HASH, name -> 'token since holder'; the holder of a lease that was freed is '-'
-- KEYS[2]   members: ZSET, gateway -> until
-- KEYS[3]   asked: HASH, name -> gateway (not used)
-- KEYS[4]   signals: STREAM
-- ARGV[1]   gateway
-- ARGV[2]   1 when it wants no leases any more, else 0
-- ARGV[3]   signals to keep, about
-- ARGV[4..] names of the leases; those that it does not hold are left alone
-- Times are Unix milliseconds of this server.
-- Returns   how many were given back

local me = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local freed = 0
for i = 4, #ARGV do
  local token, holder = string.match(redis.call('HGET', KEYS[1], ARGV[i]) or '', '^(%d+) %d+ (.+)$')
  if holder == me then
    redis.call('HSET', KEYS[1], ARGV[i], string.format('%s %.0f -', token, now))
    freed = freed + 1
  end
end
if ARGV[2] == '1' then
  redis.call('ZREM', KEYS[2], me)
end
if freed > 0 then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[3], '*', 'replica', me, 'kind', 'leases')
end
return freed
