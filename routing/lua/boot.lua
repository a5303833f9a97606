-- Numbers the boots of one engine: a later boot has a higher number, and the highest is the current one.
--
-- KEYS 1 epochs HASH: engine -> current number; engine, newline, "boots" -> lines "fingerprint number", the latest last
-- ARGV 1 engine, 2 fingerprint (no white space), 3 the number this boot had before a loss of data, or 0,
--      4 '1': the fingerprint was read from the engine just now, after a refusal
-- Returns {1, number, number of the boot before it that has just ended, or 0}: the boot is current and has this number;
--         {0, number}: the boot is older than the current one, which has this number.

local KEPT_BOOTS = 8
local engine, fingerprint, hint, force = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local current = tonumber(redis.call('HGET', KEYS[1], engine) or 0)
local known, boots = nil, {}
for name, number in string.gmatch(redis.call('HGET', KEYS[1], engine .. '\nboots') or '', '(%S+) (%d+)\n') do
  if name == fingerprint then
    known = tonumber(number)
  else
    boots[#boots + 1] = name .. ' ' .. number .. '\n'
  end
end

if known and known == current then
  return {1, current, 0}
end
local number
if force or (not known and hint == 0) then
  local time = redis.call('TIME')
  number = math.max(current + 1, time[1] * 1000 + math.floor(time[2] / 1000), hint)
elseif not known and hint > current then
  number = hint
else
  return {0, current}
end
boots[#boots + 1] = fingerprint .. ' ' .. string.format('%.0f', number) .. '\n'
while #boots > KEPT_BOOTS do
  table.remove(boots, 1)
end
redis.call('HSET', KEYS[1], engine, string.format('%.0f', number), engine .. '\nboots', table.concat(boots))
return {1, number, current}
