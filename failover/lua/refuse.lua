-- Adds refused requests to the list that all gateways share, and signals it when any of them is news.
--
-- KEYS[1]   poison: ZSET, fingerprint -> until
-- KEYS[2]   signals: STREAM
-- ARGV[1]   gateway
-- ARGV[2]   the longest that any may be refused, milliseconds
-- ARGV[3]   entries to keep: those that end first go first
-- ARGV[4]   signals to keep, about
-- ARGV[5..] fingerprint, for how long yet (milliseconds), and so on
-- Times are Unix milliseconds of this server.
-- Returns   how many were news

local longest = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local news = 0
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. now + longest, '+inf')
for i = 5, #ARGV, 2 do
  local ends = now + math.min(tonumber(ARGV[i + 1]), longest)
  news = news + redis.call('ZADD', KEYS[1], 'GT', ends, ARGV[i])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], longest)
if news > 0 then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'replica', ARGV[1], 'kind', 'poison')
end
return news
