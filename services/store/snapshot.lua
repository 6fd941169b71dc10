-- snapshot: read a record, state and rows of the same instant.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    all fields
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-0: row, epoch, digest
-- ARGV[1]  after   rows above this version only
-- returns  {0, ms left of the lease, state fields as a flat list (empty: no such record), rows as XRANGE gives them}

local state, rows = KEYS[1], KEYS[2]
local after = tonumber(ARGV[1])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local left_ms = (tonumber(redis.call('HGET', state, 'lease') or '0') or 0) - now_ms
return {0, left_ms, redis.call('HGETALL', state), redis.call('XRANGE', rows, (after + 1) .. '-0', '+')}
