-- Reads which requests are refused, and for how long yet.
--
-- KEYS[1]  poison: ZSET, fingerprint -> until
-- Times are Unix milliseconds of this server.
-- Returns  fingerprint, for how long yet (milliseconds), and so on

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES')
for i = 2, #found, 2 do
  found[i] = tonumber(found[i]) - now
end
return found
