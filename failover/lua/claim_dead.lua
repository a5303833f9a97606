-- Claims a dead gateway for the one that will release what it had, and marks it: it may not go on under its name.
-- Nothing happens where it is there again, where the data set is not the one in which it was seen dead, where the one
-- that claims is not there itself, or while another holds the claim.
--
-- KEYS[1]  lives: ZSET, replica -> until
-- KEYS[2]  addresses: HASH, replica -> URL
-- KEYS[3]  data_set: STRING
-- KEYS[4]  reaped: STRING, of the dead one
-- KEYS[5]  claim: STRING, of the dead one
-- ARGV[1]  who claims
-- ARGV[2]  who is dead
-- ARGV[3]  the data set in which that was seen
-- ARGV[4]  for how long the claim holds unless it is renewed, milliseconds
-- ARGV[5]  for how long the mark is kept, milliseconds
-- Times are Unix milliseconds of this server.
-- Returns  the claim, which nobody else has ever held; '' where there is none

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function is_there(replica)
  return (tonumber(redis.call('ZSCORE', KEYS[1], replica) or '') or 0) > now
end
if redis.call('GET', KEYS[3]) ~= ARGV[3] or redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then
  return ''
end
if is_there(ARGV[2]) or not is_there(ARGV[1]) then
  return ''
end
local claim = ARGV[1] .. ' ' .. time[1] .. '.' .. time[2]
if not redis.call('SET', KEYS[5], claim, 'NX', 'PX', ARGV[4]) then
  return ''
end
redis.call('SET', KEYS[4], claim, 'PX', ARGV[5])
return claim
