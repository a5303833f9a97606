-- Claims a process id for one gateway, renews it, or sets how long it stays taken after its owner.
--
-- KEYS[1]  process: STRING, the owner
-- ARGV[1]  owner
-- ARGV[2]  for how long, milliseconds
-- Returns  0: it is another's; 1: it was the owner's and is renewed; 2: it was nobody's and is the owner's now

local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return owner and 1 or 2
