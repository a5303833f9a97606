-- Where the log of one shard stands, and which boots are current.
--
-- KEYS 1 head HASH, 2 epochs HASH
-- ARGV 1 '1': with the boots
-- Returns {seq or 0, db_epoch or '', id of the last entry or '', [engine, number, engine, number, ...]}

local head = redis.call('HMGET', KEYS[1], 'seq', 'db_epoch', 'last')
local reply = {tonumber(head[1] or 0), head[2] or '', head[3] or ''}
if ARGV[1] == '1' then
  local epochs = redis.call('HGETALL', KEYS[2])
  for at = 1, #epochs, 2 do
    if not string.find(epochs[at], '\n', 1, true) then
      reply[#reply + 1] = epochs[at]
      reply[#reply + 1] = tonumber(epochs[at + 1])
    end
  end
end
return reply
