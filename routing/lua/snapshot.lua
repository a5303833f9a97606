-- Reads some rows of one boot of one engine.
--
-- KEYS 1 runs HASH, 2 expiry ZSET, 3 pending ZSET
-- ARGV 1 cursor ('0' begins), 2 about how many rows
-- A row that is pending comes as one of place 'p', whether it is held as well or not.
-- Returns {next cursor ('0': that was all), now, field, packed run, its expiry, field, packed run, its expiry, ...}; rows
-- that come and go meanwhile may be in it or not, and one may come twice. Times: Unix ms of this server's clock.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local scan = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local rows = {scan[1], now}
for at = 1, #scan[2], 2 do
  local field = scan[2][at]
  for name, times in pairs({[field] = KEYS[2], ['p' .. string.sub(field, 2)] = KEYS[3]}) do
    local expires = tonumber(redis.call('ZSCORE', times, field) or 0)
    if expires > now then
      rows[#rows + 1] = name
      rows[#rows + 1] = scan[2][at + 1]
      rows[#rows + 1] = expires
    end
  end
end
return rows
