-- commit: append one row after version - 1 under an epoch. All of it, or none.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    epoch, version, digest, committed_by, lease_ms,
--                                                lease, finish
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-0: row, epoch, digest
-- ARGV[1]  epoch      the committer's
-- ARGV[2]  version    the row's: it must follow the record's
-- ARGV[3]  digest     ancestry digest after the row
-- ARGV[4]  row        CommittedRow message
-- ARGV[5]  finish     finish reason, or '' when the request goes on
-- ARGV[6]  window_ms  the record outlives its lease, or its end, by this long
-- returns  OK, DUP, CONFLICT, FENCED or GONE. Only OK changes anything, and renews the lease.

local state, rows = KEYS[1], KEYS[2]
local epoch, version, digest = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local row, finish = ARGV[4], ARGV[5]
local window_ms = tonumber(ARGV[6])

local now = redis.call('HMGET', state, 'epoch', 'version', 'digest', 'committed_by', 'finish', 'lease_ms')
if not now[1] then return 'GONE' end
if now[1] ~= epoch then return 'FENCED' end
if tonumber(now[2]) == version and now[3] == digest and now[4] == epoch then return 'DUP' end
if now[5] ~= '' then return 'GONE' end
if tonumber(now[2]) + 1 ~= version then return 'CONFLICT' end

-- First the write that can be refused (the stream takes no id twice, and none out of order).
redis.call('XADD', rows, version .. '-0', 'row', row, 'epoch', epoch, 'digest', digest)
local ttl_ms = window_ms
if finish == '' then
  local lease_ms = tonumber(now[6])
  local time = redis.call('TIME')
  redis.call('HSET', state, 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms)
  ttl_ms = lease_ms + window_ms
end
redis.call('HSET', state, 'version', version, 'digest', digest, 'committed_by', epoch, 'finish', finish)
redis.call('PEXPIRE', state, ttl_ms)
redis.call('PEXPIRE', rows, ttl_ms)
return 'OK'
