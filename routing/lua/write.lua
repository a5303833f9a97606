-- Reads what is new in some logs; then applies batches of operations, each to one boot of one engine, and logs them.
-- Their layout: ownership_log.py.
--
-- KEYS, for each batch: 1 head HASH, 2 log STREAM, 3 epochs HASH, 4 runs HASH, 5 expiry ZSET, 6 pending ZSET; then the
--      logs to read
-- ARGV 1 how long log entries are kept (ms), 2 how long the rows of an engine that nobody writes to are kept (ms),
--      3 random text, the db_epoch of a data set that has none yet, 4 how many batches, 5 at most so many entries of each
--      log are read; then for each batch
--      1 'writer, its number for this batch, number of the boot, engine', by spaces, 2 '1': clear out what is over, here
--      and in the log, 3 operations; then the id after which each log is read
-- Returns what XREAD does, or false where there is nothing new, then for each batch, in order
--         {1, number, seq, db_epoch, id of the entry, id of the entry before it or '', x of the entry or '', cuts that
--           found nothing, tails that PROMOTE or TOUCH did not find...}: it is done; of the tails at most 1000, and an
--           empty one at the end if there are more;
--         {0, number}: a newer boot is known, which has this number, and nothing was done;
--         {-1, number}: this boot was never numbered here (0: none was), and nothing was done.
-- After an error the batches before the one that failed are done.
-- The entry: h = 'seq, db_epoch, id of the entry before or -', and the names of the batch, by spaces; o = operations; x =
-- the indexes of the operations that found nothing to do, by spaces, if there are any. Times are of this server's clock.

local call = redis.call
local log_ms, rows_ms, new_db_epoch, batches, count = unpack(ARGV, 1, 5)
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local head, log, epochs, runs, expiry, pending -- of the batch that is written now
local missing, lost_cuts

-- The packed run of a pending row lies where it will lie when it is held on the device: most are, and then nothing moves.
-- So it may be pending and held at once, and goes when it is neither.
local function forget(field)
  if not call('ZSCORE', expiry, field) and not call('ZSCORE', pending, field) then
    call('HDEL', runs, field)
  end
end

local function forget_expired(times)
  local late = call('ZRANGEBYSCORE', times, '-inf', now, 'LIMIT', 0, 128)
  for _, field in ipairs(late) do
    call('ZREM', times, field)
    forget(field)
  end
end

local function until_ms(field)
  local score = tonumber(call('ZSCORE', expiry, field) or 0)
  return score > now and score
end

local function hold(field, packed, expires)
  if call('HSETNX', runs, field, packed) == 0
      and (not until_ms(field) or call('HSTRLEN', runs, field) < #packed) then
    call('HSET', runs, field, packed)
  end
  call('ZADD', expiry, 'GT', expires, field)
end

local ends = {}
local function after(ttl) -- as text, which is dear to make of so large a number
  if not ends[ttl] then
    ends[ttl] = string.format('%.0f', now + ttl)
  end
  return ends[ttl]
end

local function aligned(packed, block)
  local at = string.find(packed, block, 17, true)
  while at and at % 16 ~= 1 do
    at = string.find(packed, block, at + 1, true)
  end
  return at
end

local apply = {}

local function miss(tail) -- bounded: a reply is made on Lua's stack
  if #missing <= 1000 then
    missing[#missing + 1] = #missing < 1000 and tail or ''
  end
end

function apply.c(place, ttl, packed)
  local field = 'd' .. string.sub(packed, -16)
  if call('HSETNX', runs, field, packed) == 0
      and not until_ms(field) and call('HSTRLEN', runs, field) < #packed then
    call('HSET', runs, field, packed)
  end
  call('ZADD', pending, 'GT', after(ttl), field)
  return true
end

function apply.h(place, ttl, packed)
  hold(place .. string.sub(packed, -16), packed, after(ttl))
  return true
end

-- The run that is meant has that many blocks. A pending run of another length is another's, which has the same tail; a
-- longer one that is held has all its blocks.
function apply.p(place, ttl, data)
  local tail, blocks = struct.unpack('>c16I4', data)
  local size, field, held = 16 * (blocks + 1), 'd' .. tail, place .. tail
  if call('ZREM', pending, field) == 1 and call('HSTRLEN', runs, field) == size then
    if place == 'd' then
      call('ZADD', expiry, 'GT', after(ttl), field)
    else
      hold(held, call('HGET', runs, field), after(ttl))
      forget(field)
    end
  elseif until_ms(held) and call('HSTRLEN', runs, held) >= size then
    call('ZADD', expiry, 'GT', after(ttl), held)
    forget(field)
  else
    miss(tail)
    forget(field)
    return false
  end
  return true
end

function apply.d(place, ttl, tail)
  local was_there = call('ZREM', pending, 'd' .. tail) == 1
  forget('d' .. tail)
  return was_there
end

function apply.t(place, ttl, tails)
  local any = false
  for at = 1, #tails, 16 do
    local tail = string.sub(tails, at, at + 15)
    if until_ms(place .. tail) then
      call('ZADD', expiry, 'GT', after(ttl), place .. tail)
      any = true
    else
      miss(tail)
    end
  end
  return any
end

function apply.x(place, ttl, names)
  local field = place .. string.sub(names, 1, 16)
  local expires, packed = until_ms(field), call('HGET', runs, field)
  if not expires or not packed then
    lost_cuts = lost_cuts + 1
    return false
  end
  call('ZREM', expiry, field)
  forget(field)
  local at = aligned(packed, string.sub(names, 17))
  if at and at > 17 then
    local left = string.sub(packed, 1, at - 1)
    hold(place .. string.sub(left, -16), left, expires)
  end
  return true
end

apply['0'] = function()
  call('UNLINK', runs, expiry, pending)
  return true
end

local function write(names, tidy, ops)
  local number, engine = string.match(names, '^%S+ %d+ (%d+) (.*)$')
  local current = call('HGET', epochs, engine) or '0'
  if current ~= number then
    return {tonumber(current) > tonumber(number) and 0 or -1, tonumber(current)}
  end
  local data_set = call('HMGET', head, 'seq', 'db_epoch', 'last')
  local seq, db_epoch, before = (data_set[1] or 0) + 1, data_set[2] or new_db_epoch, data_set[3]
  if tidy == '1' then
    forget_expired(expiry)
    forget_expired(pending)
  end

  missing, lost_cuts = {}, 0
  local only_added = tidy ~= '1' and call('EXISTS', runs, expiry) == 2
  local void, at, index = {}, 1, 0
  while at <= #ops do
    local kind, place, ttl, data
    kind, place, ttl, data, at = struct.unpack('>c1c1I4I4c0', ops, at)
    only_added = only_added and (kind == 'h' or kind == 't')
    if not apply[kind](place, ttl, data) then
      void[#void + 1] = index
    end
    index = index + 1
  end

  if tidy == '1' then
    call('XTRIM', log, 'MINID', '~', string.format('%.0f', now - log_ms)) -- whole nodes only, which is cheap
  end
  local name = string.format('%.0f', seq) .. ' ' .. db_epoch .. ' ' .. (before or '-') .. ' ' .. names
  void = table.concat(void, ' ')
  local id
  if void == '' then
    id = call('XADD', log, '*', 'h', name, 'o', ops)
  else
    id = call('XADD', log, '*', 'h', name, 'o', ops, 'x', void)
  end
  call('HSET', head, 'seq', string.format('%.0f', seq), 'last', id, 'db_epoch', db_epoch)
  if seq % 8 == 1 then -- often enough: the log of a shard where nothing happens any more goes
    call('PEXPIRE', log, 2 * log_ms)
  end
  if not only_added then -- else they have such a time already
    call('PEXPIRE', runs, rows_ms)
    call('PEXPIRE', expiry, rows_ms)
    call('PEXPIRE', pending, rows_ms)
  end
  return {1, tonumber(current), seq, db_epoch, id, before or '', void, lost_cuts, unpack(missing)}
end

local replies = {false}
if #KEYS > 6 * batches then
  local words = {'XREAD', 'COUNT', count, 'STREAMS', unpack(KEYS, 6 * batches + 1)}
  for at = 3 * batches + 6, #ARGV do
    words[#words + 1] = ARGV[at]
  end
  replies[1] = call(unpack(words))
end
for batch = 1, batches do
  head, log, epochs, runs, expiry, pending = unpack(KEYS, 6 * batch - 5, 6 * batch)
  replies[batch + 1] = write(unpack(ARGV, 3 * batch + 3, 3 * batch + 5))
end
return replies
