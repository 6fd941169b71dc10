-- limit: take from an API key's two buckets, which fill up over a minute; by this server's clock, for all gateways.
--
-- KEYS[1]  seqmtp:limit:<digest of the key>   hash    requests, tokens (what is left; below 0: overdrawn), at (us since 1970)
-- ARGV[1]  requests  a minute; '' for no limit
-- ARGV[2]  tokens    a minute; '' for no limit
-- ARGV[3]  begin     1: a request wants to begin
-- ARGV[4]  spent     tokens used since the last call
-- returns  {'' (granted), 'requests' or 'tokens' (what is used up), ms until there is enough}; what was spent is taken
--          in any case

local bucket = KEYS[1]
local limits = {requests = tonumber(ARGV[1]), tokens = tonumber(ARGV[2])}
local begin, spent = ARGV[3] == '1', tonumber(ARGV[4])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local found = redis.call('HMGET', bucket, 'requests', 'tokens', 'at')
local minutes = math.max(0, now - (tonumber(found[3]) or now)) / 60000000

local function level(name, held)
  local limit = limits[name]
  return limit and math.min(limit, (tonumber(held) or limit) + minutes * limit)
end
local left = {requests = level('requests', found[1]), tokens = level('tokens', found[2])}
if left.tokens then left.tokens = left.tokens - spent end

local refused, missing = '', 0
if begin then
  if left.requests and left.requests < 1 then
    refused, missing = 'requests', 1 - left.requests
  elseif left.tokens and left.tokens <= 0 then
    refused, missing = 'tokens', 1 - left.tokens
  elseif left.requests then
    left.requests = left.requests - 1
  end
end

-- A bucket that is full again is forgotten.
local full_ms = 0
for name, limit in pairs(limits) do
  redis.call('HSET', bucket, name, string.format('%.6f', left[name]))
  full_ms = math.max(full_ms, (limit - left[name]) / limit * 60000)
end
redis.call('HSET', bucket, 'at', string.format('%.0f', now))
redis.call('PEXPIRE', bucket, math.ceil(full_ms) + 1000)
return {refused, refused == '' and 0 or math.ceil(missing / limits[refused] * 60000)}
