-- finish: end a record without a row (an error, a lost target). A row that ends the text goes through commit.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    epoch, version, digest, finish
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-1: finish, epoch, digest
-- ARGV[1]  epoch      the owner's
-- ARGV[2]  finish     finish reason
-- ARGV[3]  window_ms  the record stays readable this long
-- returns  OK, DUP (it ended so before), FENCED or GONE. Only OK changes anything.

local state, rows = KEYS[1], KEYS[2]
local epoch, finish, window_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local now = redis.call('HMGET', state, 'epoch', 'version', 'finish', 'digest')
if not now[1] then return 'GONE' end
if now[1] ~= epoch then return 'FENCED' end
if now[3] == finish then return 'DUP' end
if now[3] ~= '' then return 'GONE' end

redis.call('XADD', rows, now[2] .. '-1', 'finish', finish, 'epoch', now[1], 'digest', now[4])
redis.call('HSET', state, 'finish', finish)
redis.call('PEXPIRE', state, window_ms)
redis.call('PEXPIRE', rows, window_ms)
return 'OK'
