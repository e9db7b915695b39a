"""The usage book in Redis: Lua, because a script is one step for everybody else. Same rules as cluster/usage.py.

A day is a hash: `<epoch> <tenant> <model>` -> sums with commas between; once folded the epoch is `all`. A set holds the
days that are not folded yet. Fields that cannot be read are nobody's usage and stay as they are. Which days are open
the server's clock decides; a caller may give another time (ARGV[1], empty: the server's). ARGV[2]: the day, ARGV[3]:
OPEN_DAYS.
"""

_COMMON = """
local now = tonumber(ARGV[1])
if not now then now = tonumber(redis.call('TIME')[1]) end
local today = math.floor(now / 86400)
local day, open_days = tonumber(ARGV[2]), tonumber(ARGV[3])
local function split(text)
  local sums = {}
  for number in string.gmatch(text, '%d+') do sums[#sums + 1] = tonumber(number) end
  return sums
end
local function written(sums)
  local texts = {}
  for at, number in ipairs(sums) do texts[at] = string.format('%.0f', number) end
  return table.concat(texts, ',')
end
"""

WRITE = (
    _COMMON
    + """
if day < today - open_days or day > today + 1 then return today end
local keep_days = tonumber(ARGV[4])
for at = 5, #ARGV, 2 do
  local sums = split(ARGV[at + 1])
  local had = redis.call('HGET', KEYS[1], ARGV[at])
  if had then
    for place, number in ipairs(split(had)) do sums[place] = math.max(sums[place] or 0, number) end
  end
  redis.call('HSET', KEYS[1], ARGV[at], written(sums))
end
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[1], (keep_days + 1 - (today - day)) * 86400)
return -1
"""
)
"""KEYS: the day, the days that are not folded. ARGV[4]: for how many days it is kept; then fields and sums."""

FOLD = (
    _COMMON
    + """
if day >= today - open_days then return 0 end
local found, total, folded = redis.call('HGETALL', KEYS[1]), {}, {}
for at = 1, #found, 2 do
  local who = string.match(found[at], '^%S+ (%S* .*)$')
  if who and string.match(found[at + 1], '^%d[%d,]*$') then
    local sums = total[who] or {}
    for place, number in ipairs(split(found[at + 1])) do sums[place] = (sums[place] or 0) + number end
    total[who] = sums
    if string.sub(found[at], 1, 4) ~= 'all ' then folded[#folded + 1] = found[at] end
  end
end
for who, sums in pairs(total) do redis.call('HSET', KEYS[1], 'all ' .. who, written(sums)) end
for _, field in ipairs(folded) do redis.call('HDEL', KEYS[1], field) end
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""
)
"""KEYS: the day, the days that are not folded."""
