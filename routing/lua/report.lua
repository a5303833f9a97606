-- One replica says that it is there, and how far it has read.
--
-- KEYS 1 replicas HASH: replica -> its last report (ms of this server's clock), then the seq of each shard, by spaces
-- ARGV 1 replica, 2 the seq of each shard, by spaces, 3 after how long without a report a replica is forgotten (ms)
-- Returns the number of replicas.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now) .. ARGV[2])
local reports = redis.call('HGETALL', KEYS[1])
for at = 1, #reports, 2 do
  if (tonumber(string.match(reports[at + 1], '^%d+')) or 0) < now - ARGV[3] then
    redis.call('HDEL', KEYS[1], reports[at])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3] * 2)
return #reports / 2
