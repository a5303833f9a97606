-- Renews the leases of one gateway, takes free ones up to its fair share, and hands over those that another asked for.
-- A lease is held while its holder is a member that counts, so that renewing writes nothing but the member. Who has less
-- than his share asks for leases of those who have more; asking and handing over are signalled, so that the other comes
-- at once. A free lease that nobody took for a while is taken by whoever comes.
--
-- KEYS[1]   leases: HASH, name -> 'token since holder'; the holder of a lease that was freed is '-'
-- KEYS[2]   members: ZSET, gateway -> until
-- KEYS[3]   asked: HASH, name -> gateway
-- KEYS[4]   signals: STREAM
-- ARGV[1]   gateway
-- ARGV[2]   time to live, milliseconds; all gateways use the same
-- ARGV[3]   how long a free lease is left to those who have less than their share, milliseconds
-- ARGV[4]   signals to keep, about
-- ARGV[5..] names of the leases that it wants
-- Times are Unix milliseconds of this server. One further ahead than the time to live was written by another clock.
-- Returns   for each name the fencing token if the gateway holds it now, else 0

local FIRST, CHUNK = 5, 1000
local me, ttl, patience = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local till = now + ttl

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '(' .. till, '+inf')
redis.call('ZADD', KEYS[2], till, me)
local members = redis.call('ZRANGE', KEYS[2], 0, -1)
local share = math.ceil((#ARGV - FIRST + 1) / #members)
local held = {}
for _, member in ipairs(members) do
  held[member] = 0
end

local rows = {}
for start = FIRST, #ARGV, CHUNK do
  local last = math.min(start + CHUNK - 1, #ARGV)
  for i, row in ipairs(redis.call('HMGET', KEYS[1], unpack(ARGV, start, last))) do
    local token, since, holder = string.match(row or '', '^(%d+) (%d+) (.+)$')
    rows[start + i - 1] = {token = tonumber(token or 0), since = tonumber(since or 0), holder = holder}
    if held[holder or '-'] then
      held[holder] = held[holder] + 1
    end
  end
end

local asks, found = {}, redis.call('HGETALL', KEYS[3])
for i = 1, #found, 2 do
  asks[found[i]] = found[i + 1]
end

local function give(name, token, holder)
  redis.call('HSET', KEYS[1], name, string.format('%.0f %.0f %s', token, now, holder))
end

local asked, told, tokens = 0, false, {}
for i = FIRST, #ARGV do
  local name, row, token = ARGV[i], rows[i], 0
  local asker = asks[name]
  local next_token = math.max(row.token + 1, now)
  if row.holder == me and asker and asker ~= me and held[asker] then
    give(name, next_token, asker)
    redis.call('HDEL', KEYS[3], name)
    held[me], told = held[me] - 1, true
  elseif row.holder == me then
    token = row.token
  elseif held[row.holder or '-'] then
    if held[me] + asked < share and held[row.holder] > share then
      redis.call('HSET', KEYS[3], name, me)
      held[row.holder] = held[row.holder] - 1
      asked, told = asked + 1, true
    end
  elseif held[me] < share or (row.holder or '-') == '-' and (row.since + patience <= now or row.since > now) then
    token = next_token
    give(name, token, me)
    held[me] = held[me] + 1
  elseif row.holder ~= '-' then
    give(name, row.token, '-')  -- its holder is gone
  end
  tokens[#tokens + 1] = token
end

redis.call('PEXPIRE', KEYS[1], 100 * ttl)
redis.call('PEXPIRE', KEYS[2], 100 * ttl)
if asked > 0 then
  redis.call('PEXPIRE', KEYS[3], ttl)
end
if told then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], '*', 'replica', me, 'kind', 'leases')
end
return tokens
