-- cancel: end a record, from outside or by an owner whose readers are gone. The owner's next commit is answered GONE.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    epoch, version, digest, finish, reader
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-1: finish, epoch, digest
-- ARGV[1]  finish       the finish reason of a cancelled request
-- ARGV[2]  window_ms    the record stays readable this long
-- ARGV[3]  abandoned_at epoch of the owner nobody reads from: only if it is still that, and not while somebody reads
--                       through another process (attend.lua). '': whatever the epoch
-- returns  OK, DUP (it was cancelled before), FENCED (another owns it), CONFLICT (it is read) or GONE (unknown, or
--          ended otherwise). Only OK changes anything.

local state, rows = KEYS[1], KEYS[2]
local finish, window_ms, abandoned_at = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local now = redis.call('HMGET', state, 'version', 'finish', 'reader', 'epoch', 'digest')
if not now[1] then return 'GONE' end
if now[2] == finish then return 'DUP' end
if now[2] ~= '' then return 'GONE' end
if abandoned_at ~= '' then
  if now[4] ~= abandoned_at then return 'FENCED' end
  local time = redis.call('TIME')
  if tonumber(now[3]) > time[1] * 1000 + math.floor(time[2] / 1000) then return 'CONFLICT' end
end

redis.call('XADD', rows, now[1] .. '-1', 'finish', finish, 'epoch', now[4], 'digest', now[5])
redis.call('HSET', state, 'finish', finish)
redis.call('PEXPIRE', state, window_ms)
redis.call('PEXPIRE', rows, window_ms)
return 'OK'
