-- acquire: create a request's record, or take it over by raising its epoch. A finished record is returned as it is.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    request, digest, epoch, version, committed_by, owner,
--                                                claim, lease_ms, lease (ms since 1970), finish
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-0: row; entry <version>-1: finish (ended without a row)
-- ARGV[1]  request    Request message; kept from the first acquire on
-- ARGV[2]  digest     ancestry digest of version 0
-- ARGV[3]  owner      who asks
-- ARGV[4]  claim      unique to this call: the same call sent again does not raise the epoch again
-- ARGV[5]  lease_ms   ownership lapses this long from now unless renewed by a commit
-- ARGV[6]  window_ms  the record outlives its lease by this long
-- returns  {state fields as a flat list, rows as XRANGE gives them}

local state, rows = KEYS[1], KEYS[2]
local request, digest, owner, claim = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease_ms, window_ms = tonumber(ARGV[5]), tonumber(ARGV[6])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if redis.call('EXISTS', state) == 0 then
  redis.call('HSET', state, 'request', request, 'digest', digest, 'epoch', 0, 'version', 0,
    'committed_by', 0, 'finish', '')
end
if redis.call('HGET', state, 'finish') == '' then
  if redis.call('HGET', state, 'claim') ~= claim then
    redis.call('HINCRBY', state, 'epoch', 1)
    redis.call('HSET', state, 'owner', owner, 'claim', claim)
  end
  redis.call('HSET', state, 'lease_ms', lease_ms, 'lease', now_ms + lease_ms)
  redis.call('PEXPIRE', state, lease_ms + window_ms)
  redis.call('PEXPIRE', rows, lease_ms + window_ms)
end
return {redis.call('HGETALL', state), redis.call('XRANGE', rows, '1-0', '+')}
