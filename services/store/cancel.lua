-- cancel: end a record from outside, whatever its epoch. Its owner's next commit is answered GONE.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    version, finish
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-1: finish
-- ARGV[1]  finish     the finish reason of a cancelled request
-- ARGV[2]  window_ms  the record stays readable this long
-- returns  OK, DUP (it had ended already) or GONE (unknown). Only OK changes anything.

local state, rows = KEYS[1], KEYS[2]
local finish, window_ms = ARGV[1], tonumber(ARGV[2])

local now = redis.call('HMGET', state, 'version', 'finish')
if not now[1] then return 'GONE' end
if now[2] ~= '' then return 'DUP' end

redis.call('XADD', rows, now[1] .. '-1', 'finish', finish)
redis.call('HSET', state, 'finish', finish)
redis.call('PEXPIRE', state, window_ms)
redis.call('PEXPIRE', rows, window_ms)
return 'OK'
