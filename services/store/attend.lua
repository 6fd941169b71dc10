-- attend: leave word that somebody reads the request through a process that does not own it.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    finish, reader
-- ARGV[1]  for_ms  the word stands this long
-- returns  OK or GONE (unknown, or ended: nobody needs to be kept from cancelling it)

local state = KEYS[1]
local for_ms = tonumber(ARGV[1])

if redis.call('HGET', state, 'finish') ~= '' then return 'GONE' end
local time = redis.call('TIME')
redis.call('HSET', state, 'reader', time[1] * 1000 + math.floor(time[2] / 1000) + for_ms)
return 'OK'
