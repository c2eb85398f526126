"""What Redis does in one step: Lua scripts, atomic, each first looking whether the store is ours.

Every script has the keys of :data:`KEYS` and begins with four arguments: the cluster's id, the format that this
build writes, the greatest revision that the caller has seen, and the caller's master id. It answers a list whose
first item says how it went: ``ok``, ``format N``, ``cluster ID`` or ``deposed N``.

The first write of a script is one that needs memory: a Redis that is full, or takes no writes, refuses it there,
and nothing has been done. Numbers that may be large stay text: Lua would print them as floats.
"""

from __future__ import annotations

from typing import Final

#: Keys after the prefix. The first three hold what is not a row.
KEYS: Final = (
    "facts",
    "lease",
    "masters",
    "nodes",
    "groups",
    "tombstones",
    "policies",
    "fallback",
    "grants",
    "scopes",
    "replicas",
)

#: An emptied store gets back whose it is. One that a new master has found empty, and that nothing was saved in, too:
#: the cluster that was there before has policy to write back, the new one has none.
_OURS: Final = """
local facts, lease, masters = KEYS[1], KEYS[2], KEYS[3]
local mine, format, seen, me = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local has = redis.call('HMGET', facts, 'format', 'cluster_id', 'revision', 'leader_epoch', 'leader_id')
local revision, known_epoch = tonumber(has[3] or '0'), tonumber(has[4] or '0')
if has[1] and tonumber(has[1]) > tonumber(format) then return {'format ' .. has[1]} end
if has[2] and has[2] ~= mine then
  if revision > 0 or seen == 0 then return {'cluster ' .. has[2]} end
  redis.call('HSET', facts, 'cluster_id', mine)
  redis.call('DEL', lease, masters)
end
if not has[2] then redis.call('HSET', facts, 'format', format, 'cluster_id', mine) end
local function whole(number) return string.format('%.0f', number) end
"""

#: Arguments: epoch, the greatest number of a command or '', then key's number, field and value of each row; a value
#: of '' deletes the row.
SAVE: Final = (
    _OURS
    + """
local epoch, command = tonumber(ARGV[5]), ARGV[6]
if epoch > 0 then
  local other = known_epoch == epoch and me ~= '' and has[5] and has[5] ~= '' and has[5] ~= me
  if known_epoch > epoch or other then return {'deposed ' .. whole(known_epoch)} end
end
redis.call('HINCRBY', facts, 'revision', 1)
if epoch > known_epoch then redis.call('HSET', facts, 'leader_epoch', ARGV[5], 'leader_id', me) end
if command ~= '' and tonumber(command) > tonumber(redis.call('HGET', facts, 'last_command') or '0') then
  redis.call('HSET', facts, 'last_command', command)
end
for at = 7, #ARGV, 3 do
  local key = KEYS[tonumber(ARGV[at])]
  if ARGV[at + 2] == '' then
    redis.call('HDEL', key, ARGV[at + 1])
  else
    redis.call('HSET', key, ARGV[at + 1], ARGV[at + 2])
  end
end
return {'ok'}
"""
)

#: Arguments: TTL in ms, the greatest epoch heard of, channel, gRPC and HTTP endpoint. Answers who leads.
#: A lease older than a write of a greater epoch is worth nothing: it is taken anew.
CAMPAIGN: Final = (
    _OURS
    + """
local holder = redis.call('HMGET', lease, 'master_id', 'epoch')
local epoch = holder[2]
local renewed = holder[1] == me and tonumber(epoch) >= known_epoch
if not holder[1] or (holder[1] == me and not renewed) then
  epoch = whole(1 + math.max(known_epoch, tonumber(ARGV[6])))
  redis.call('HSET', facts, 'leader_epoch', epoch, 'leader_id', me)
  renewed = true
end
if renewed then
  redis.call('HSET', lease, 'master_id', me, 'epoch', epoch, 'channel', ARGV[7], 'grpc', ARGV[8], 'http', ARGV[9])
  redis.call('PEXPIRE', lease, ARGV[5])
end
return {'ok', unpack(redis.call('HMGET', lease, 'master_id', 'epoch', 'channel', 'grpc', 'http'))}
"""
)

RESIGN: Final = (
    _OURS
    + """
if redis.call('HGET', lease, 'master_id') == me then redis.call('DEL', lease) end
return {'ok'}
"""
)

#: What :data:`ANNOUNCE` and :data:`MASTERS` share: milliseconds now by Redis's own clock.
_NOW: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

#: Arguments: TTL in ms, channel, gRPC and HTTP endpoint. Forgets who has not announced itself for its TTL.
ANNOUNCE: Final = (
    _OURS
    + _NOW
    + """
local row = cjson.encode({whole(now + tonumber(ARGV[5])), ARGV[6], ARGV[7], ARGV[8]})
redis.call('HSET', masters, me, row)
local rows = redis.call('HGETALL', masters)
for at = 1, #rows, 2 do
  if tonumber(cjson.decode(rows[at + 1])[1]) <= now then redis.call('HDEL', masters, rows[at]) end
end
return {'ok'}
"""
)

#: Reads only. Answers five items a master: id, epoch (0: does not lead), channel, gRPC and HTTP endpoint.
MASTERS: Final = (
    _NOW
    + """
local holder = redis.call('HMGET', KEYS[2], 'master_id', 'epoch')
local answer = {'ok'}
local rows = redis.call('HGETALL', KEYS[3])
for at = 1, #rows, 2 do
  local row = cjson.decode(rows[at + 1])
  if tonumber(row[1]) > now then
    local epoch = holder[1] == rows[at] and holder[2] or '0'
    for _, item in ipairs({rows[at], epoch, row[2], row[3], row[4]}) do answer[#answer + 1] = item end
  end
end
return answer
"""
)

#: Reads only, all of one moment. Answers fields and values of the facts, then of each hash of rows. A transaction would
#: do, if a Redis that is full did not refuse it.
LOAD: Final = """
local answer = {'ok', redis.call('HGETALL', KEYS[1])}
for at = 4, #KEYS do answer[#answer + 1] = redis.call('HGETALL', KEYS[at]) end
return answer
"""

#: Arguments as :data:`_OURS`, but the id is the one to take if there is none. Answers the id that holds.
OPEN: Final = """
local has = redis.call('HMGET', KEYS[1], 'format', 'cluster_id')
if has[1] and tonumber(has[1]) > tonumber(ARGV[2]) then return {'format ' .. has[1]} end
if not has[2] then
  redis.call('HSET', KEYS[1], 'format', ARGV[2], 'cluster_id', ARGV[1])
  return {'ok', ARGV[1], ARGV[2]}
end
return {'ok', has[2], has[1] or ARGV[2]}
"""
