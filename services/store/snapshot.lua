-- snapshot: read a record, state and rows of the same instant.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    all fields
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-0: row
-- ARGV[1]  after   rows above this version only
-- returns  {state fields as a flat list (empty: no such record), rows as XRANGE gives them}

local after = tonumber(ARGV[1])
return {redis.call('HGETALL', KEYS[1]), redis.call('XRANGE', KEYS[2], (after + 1) .. '-0', '+')}
