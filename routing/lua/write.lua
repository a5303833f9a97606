-- Applies a batch of operations to one boot of one engine, and logs it. The layout of operations: ownership_log.py.
--
-- KEYS 1 head HASH, 2 log STREAM, 3 epochs HASH, 4 runs HASH, 5 expiry ZSET, 6 pending ZSET
-- ARGV 1 writer, 2 its number for this batch, 3 engine, 4 number of the boot, 5 how long log entries are kept (ms),
--      6 how long the rows of an engine that nobody writes to are kept (ms), 7 random text, the db_epoch of a data set
--      that has none yet, 8 operations
-- Returns {1, number, seq, db_epoch, cuts that found nothing, tails that PROMOTE or TOUCH did not find...}: it is done;
--         {0, number}: a newer boot is known, which has this number, and nothing was done;
--         {-1, number}: this boot was never numbered here (0: none was), and nothing was done.
-- Times are of this server's clock.

local head, log, epochs, runs, expiry, pending = unpack(KEYS)
local current = tonumber(redis.call('HGET', epochs, ARGV[3]) or 0)
local number = tonumber(ARGV[4])
if current ~= number then
  return {current > number and 0 or -1, current}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seq = redis.call('HINCRBY', head, 'seq', 1)
local data_set = redis.call('HMGET', head, 'db_epoch', 'last')
if not data_set[1] then
  data_set[1] = ARGV[7]
  redis.call('HSET', head, 'db_epoch', ARGV[7])
end

-- The packed run of a pending row lies where it will lie when it is held on the device: most are, and then nothing moves.
-- So it may be pending and held at once, and goes when it is neither.
local function forget(field)
  if not redis.call('ZSCORE', expiry, field) and not redis.call('ZSCORE', pending, field) then
    redis.call('HDEL', runs, field)
  end
end

local function forget_expired(times)
  local late = redis.call('ZRANGEBYSCORE', times, '-inf', now, 'LIMIT', 0, 64)
  for _, field in ipairs(late) do
    redis.call('ZREM', times, field)
    forget(field)
  end
end

local function until_ms(field)
  local score = tonumber(redis.call('ZSCORE', expiry, field) or 0)
  return score > now and score
end

local function hold(field, packed, expires)
  if not until_ms(field) or redis.call('HSTRLEN', runs, field) < #packed then
    redis.call('HSET', runs, field, packed)
  end
  redis.call('ZADD', expiry, 'GT', expires, field)
end

local function aligned(packed, block)
  local at = string.find(packed, block, 17, true)
  while at and at % 16 ~= 1 do
    at = string.find(packed, block, at + 1, true)
  end
  return at
end

local missing, lost_cuts, void = {}, 0, {}
local apply = {}

function apply.c(place, ttl, packed)
  local field = 'd' .. string.sub(packed, -16)
  if not until_ms(field) and redis.call('HSTRLEN', runs, field) < #packed then
    redis.call('HSET', runs, field, packed)
  end
  redis.call('ZADD', pending, 'GT', now + ttl, field)
  return true
end

function apply.h(place, ttl, packed)
  hold(place .. string.sub(packed, -16), packed, now + ttl)
  return true
end

function apply.p(place, ttl, tail)
  local field = 'd' .. tail
  if redis.call('ZREM', pending, field) == 1 and redis.call('HEXISTS', runs, field) == 1 then
    if place == 'd' then
      redis.call('ZADD', expiry, 'GT', now + ttl, field)
    else
      hold(place .. tail, redis.call('HGET', runs, field), now + ttl)
      forget(field)
    end
  elseif until_ms(place .. tail) then
    redis.call('ZADD', expiry, 'GT', now + ttl, place .. tail)
  else
    missing[#missing + 1] = tail
    return false
  end
  return true
end

function apply.d(place, ttl, tail)
  local was_there = redis.call('ZREM', pending, 'd' .. tail) == 1
  forget('d' .. tail)
  return was_there
end

function apply.t(place, ttl, tails)
  local any = false
  for at = 1, #tails, 16 do
    local tail = string.sub(tails, at, at + 15)
    if until_ms(place .. tail) then
      redis.call('ZADD', expiry, 'GT', now + ttl, place .. tail)
      any = true
    else
      missing[#missing + 1] = tail
    end
  end
  return any
end

function apply.x(place, ttl, names)
  local field = place .. string.sub(names, 1, 16)
  local expires, packed = until_ms(field), redis.call('HGET', runs, field)
  if not expires or not packed then
    lost_cuts = lost_cuts + 1
    return false
  end
  redis.call('ZREM', expiry, field)
  forget(field)
  local at = aligned(packed, string.sub(names, 17))
  if at and at > 17 then
    local left = string.sub(packed, 1, at - 1)
    hold(place .. string.sub(left, -16), left, expires)
  end
  return true
end

apply['0'] = function()
  redis.call('UNLINK', runs, expiry, pending)
  return true
end

forget_expired(expiry)
forget_expired(pending)
local at, index = 1, 0
while at <= #ARGV[8] do
  local kind, place, ttl, data
  kind, place, ttl, data, at = struct.unpack('>c1c1I4I4c0', ARGV[8], at)
  if not apply[kind](place, ttl, data) then
    void[#void + 1] = index
  end
  index = index + 1
end

-- MINID ~ drops whole nodes of the stream only, which is cheap.
local id = redis.call('XADD', log, 'MINID', '~', now - ARGV[5], '*', 's', seq, 'd', data_set[1], 'p', data_set[2] or '',
  'w', ARGV[1], 'b', ARGV[2], 'e', ARGV[3], 'n', ARGV[4], 'x', table.concat(void, ' '), 'o', ARGV[8])
redis.call('HSET', head, 'last', id)
if seq % 8 == 1 then -- often enough: the log of a shard where nothing happens any more goes
  redis.call('PEXPIRE', log, 2 * ARGV[5])
end
redis.call('PEXPIRE', runs, ARGV[6])
redis.call('PEXPIRE', expiry, ARGV[6])
redis.call('PEXPIRE', pending, ARGV[6])
return {1, current, seq, data_set[1], lost_cuts, unpack(missing)}
