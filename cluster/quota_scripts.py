"""The quota book in Redis: Lua, because a script is one step for everybody else. Same rules as cluster/quotas.py.

KEYS: a hash of buckets (`requests`, `requests:at`, `tokens`, `tokens:at`) and a sorted set of permits by the time until
which they are held; both carry the tenant as hash tag, so they live on one node of a cluster. Time is the server's own,
so routers' clocks do not matter; a caller may give another one (ARGV[1], empty: the server's).
"""

_COMMON = """
local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) + tonumber(t[2]) / 1000000
end
local function level(kind, limit)
  local had = redis.call('HMGET', KEYS[1], kind, kind .. ':at')
  if not had[1] then return limit end
  local passed = math.max(0, now - tonumber(had[2]))
  return math.min(limit, tonumber(had[1]) + passed * limit / 60)
end
local function charge(kind, limit, amount)
  local left = math.min(limit, level(kind, limit) - amount)
  redis.call('HSET', KEYS[1], kind, string.format('%.6f', left), kind .. ':at', string.format('%.6f', now))
  local full = math.ceil((limit - left) * 60 / limit) + 60
  redis.call('EXPIRE', KEYS[1], math.max(full, redis.call('TTL', KEYS[1])))
end
"""

TAKE = (
    _COMMON
    + """
local permit, tokens, lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local limits = {requests = tonumber(ARGV[5]), tokens = tonumber(ARGV[6])}
local concurrency = tonumber(ARGV[7])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if concurrency and redis.call('ZCARD', KEYS[2]) >= concurrency then return {'concurrency', ''} end
local costs = {{'requests', 1}, {'tokens', tokens}}
for _, cost in ipairs(costs) do
  local limit = limits[cost[1]]
  if limit then
    local missing = math.min(cost[2], limit) - level(cost[1], limit)
    if missing > 0 then return {cost[1], string.format('%.6f', missing * 60 / limit)} end
  end
end
for _, cost in ipairs(costs) do
  if limits[cost[1]] then charge(cost[1], limits[cost[1]], cost[2]) end
end
redis.call('ZADD', KEYS[2], string.format('%.6f', now + lease), permit)
redis.call('EXPIRE', KEYS[2], math.ceil(lease) + 60)
return {}
"""
)

SETTLE = (
    _COMMON
    + """
local tokens, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
for i = 4, #ARGV do redis.call('ZREM', KEYS[2], ARGV[i]) end
if limit and tokens ~= 0 then charge('tokens', limit, tokens) end
return {}
"""
)

HOLD = (
    _COMMON
    + """
local lease = tonumber(ARGV[2])
for i = 3, #ARGV do redis.call('ZADD', KEYS[2], string.format('%.6f', now + lease), ARGV[i]) end
redis.call('EXPIRE', KEYS[2], math.ceil(lease) + 60)
return {}
"""
)
