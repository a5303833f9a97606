-- Says that one gateway is there, and whom it takes for dead; tells who is there, who is gone, and who says what of whom.
--
-- KEYS[1]   lives: ZSET, replica -> until
-- KEYS[2]   addresses: HASH, replica -> URL, maybe empty
-- KEYS[3]   verdicts: ZSET, 'observer suspect' -> until
-- KEYS[4]   data_set: STRING
-- KEYS[5]   reaped: STRING, of this replica
-- ARGV[1]   replica
-- ARGV[2]   time to live, milliseconds; all replicas use the same
-- ARGV[3]   its address, maybe empty
-- ARGV[4]   drawn by chance: names the data set if nothing does
-- ARGV[5]   for how long one that is gone stays known, milliseconds
-- ARGV[6]   the same for one without an address, of which nobody can ever say that it is dead
-- ARGV[7..] whom it takes for dead
-- Times are Unix milliseconds of this server. One further ahead than the time to live was written by another clock.
-- Returns   {1} when this replica was declared dead, and then nothing is changed; else {0, the data set and the server's
--           run, {replica, 1 if it is there else 0, address, and so on}, {'observer suspect', ...}}

local me, ttl, keep, keep_nameless = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[5]) == 1 then
  return {1}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local till = now + ttl

redis.call('SET', KEYS[4], ARGV[4], 'NX')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. till, '+inf')
redis.call('ZADD', KEYS[1], till, me)
redis.call('HSET', KEYS[2], me, ARGV[3])

local replicas, found = {}, redis.call('HGETALL', KEYS[2])
for i = 1, #found, 2 do
  local name, address = found[i], found[i + 1]
  local left = (tonumber(redis.call('ZSCORE', KEYS[1], name) or '') or now) - now
  if left < -(address == '' and keep_nameless or keep) then
    redis.call('ZREM', KEYS[1], name)
    redis.call('HDEL', KEYS[2], name)
  else
    replicas[#replicas + 1] = name
    replicas[#replicas + 1] = left > 0 and 1 or 0
    replicas[#replicas + 1] = address
  end
end

redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '(' .. till, '+inf')
for _, verdict in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if string.sub(verdict, 1, #me + 1) == me .. ' ' then
    redis.call('ZREM', KEYS[3], verdict)
  end
end
for i = 7, #ARGV do
  redis.call('ZADD', KEYS[3], till, me .. ' ' .. ARGV[i])
end

redis.call('PEXPIRE', KEYS[1], keep)
redis.call('PEXPIRE', KEYS[2], keep)
redis.call('PEXPIRE', KEYS[3], keep)
redis.call('PEXPIRE', KEYS[4], keep)
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
return {0, redis.call('GET', KEYS[4]) .. ' ' .. run, replicas, redis.call('ZRANGE', KEYS[3], 0, -1)}
