-- renew: keep the lease of a request that commits nothing for a while (queued, or in a long prefill), or hand it back.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    epoch, lease, finish
-- KEYS[2]  seqmtp:{<request id>}:rows    stream
-- ARGV[1]  epoch      the owner's
-- ARGV[2]  lease_ms   it lapses this long from now; 0: another may take the record over at once
-- ARGV[3]  window_ms  the record outlives its lease by this long
-- returns  OK, FENCED or GONE

local state, rows = KEYS[1], KEYS[2]
local epoch, lease_ms, window_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local now = redis.call('HMGET', state, 'epoch', 'finish')
if not now[1] then return 'GONE' end
if now[1] ~= epoch then return 'FENCED' end
if now[2] ~= '' then return 'GONE' end

local time = redis.call('TIME')
redis.call('HSET', state, 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms)
redis.call('PEXPIRE', state, lease_ms + window_ms)
redis.call('PEXPIRE', rows, lease_ms + window_ms)
return 'OK'
