-- acquire: create a request's record, or take it over by raising its epoch. A finished record is returned as it is.
--
-- KEYS[1]  seqmtp:{<request id>}:state   hash    request, meta, digest, epoch, version, committed_by, owner,
--                                                claim, lease_ms, lease (ms since 1970), finish, reader (ms since 1970)
-- KEYS[2]  seqmtp:{<request id>}:rows    stream  entry <version>-0: row, epoch, digest; entry <version>-1: finish, epoch, digest
--                                                (ended without a row)
-- ARGV[1]  request    Request message; kept from the first acquire on
-- ARGV[2]  meta       JSON object of strings; kept from the first acquire on
-- ARGV[3]  digest     ancestry digest of version 0
-- ARGV[4]  owner      who asks
-- ARGV[5]  claim      unique to this call: the same call sent again does not raise the epoch again
-- ARGV[6]  seen       only if the epoch is still this one (0: only if there is no record); '' for any
-- ARGV[7]  above      the new epoch is higher than this, and than the record's
-- ARGV[8]  lease_ms   ownership lapses this long from now unless renewed, by a commit for one
-- ARGV[9]  window_ms  the record outlives its lease by this long
-- returns  {1 if the caller owns it now, ms left of the lease, state fields as a flat list (empty: there is no record
--          and `seen` forbids to create one), rows as XRANGE gives them}

local state, rows = KEYS[1], KEYS[2]
local request, meta, digest, owner, claim = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local seen, above = ARGV[6], tonumber(ARGV[7])
local lease_ms, window_ms = tonumber(ARGV[8]), tonumber(ARGV[9])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if redis.call('EXISTS', state) == 0 then
  if seen ~= '' and seen ~= '0' then return {0, 0, {}, {}} end
  redis.call('HSET', state, 'request', request, 'meta', meta, 'digest', digest, 'epoch', 0, 'version', 0,
    'committed_by', 0, 'owner', '', 'claim', '', 'lease', 0, 'lease_ms', 0, 'finish', '', 'reader', 0)
end
local now = redis.call('HMGET', state, 'epoch', 'finish', 'claim')
local acquired = 0
if now[2] == '' then
  if now[3] == claim then
    acquired = 1
  elseif seen == '' or seen == now[1] then
    local epoch = math.max(tonumber(now[1]), above) + 1
    redis.call('HSET', state, 'epoch', epoch, 'owner', owner, 'claim', claim)
    acquired = 1
  end
end
if acquired == 1 then
  redis.call('HSET', state, 'lease_ms', lease_ms, 'lease', now_ms + lease_ms)
  redis.call('PEXPIRE', state, lease_ms + window_ms)
  redis.call('PEXPIRE', rows, lease_ms + window_ms)
end
local left_ms = redis.call('HGET', state, 'lease') - now_ms
return {acquired, left_ms, redis.call('HGETALL', state), redis.call('XRANGE', rows, '1-0', '+')}
