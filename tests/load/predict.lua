-- For wrk: POST /predict with the texts of a JSON list in turn. wrk ... -s predict.lua URL -- FILE
-- Prints one line of JSON: requests per second, latencies in milliseconds, responses with a status other than 2xx or 3xx, broken connections.

local texts, next_text = {}, 0

function init(args)
   local file = assert(io.open(args[1]), "no such file: " .. tostring(args[1]))
   -- The strings keep their JSON escapes, which the body needs.
   for text in file:read("a"):gmatch('"input": ("[^\n]*"),\n') do
      texts[#texts + 1] = '{"text": ' .. text .. "}"
   end
   assert(#texts > 0, "no `input` in " .. args[1])
end

function request()
   next_text = next_text % #texts + 1
   return wrk.format("POST", "/predict", { ["Content-Type"] = "application/json" }, texts[next_text])
end

function done(summary, latency)
   local errors = summary.errors
   io.write(string.format(
      '{"per_second": %.1f, "p50_ms": %.2f, "p99_ms": %.2f, "failed": %d, "broken": %d}\n',
      summary.requests / summary.duration * 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
      errors.status, errors.connect + errors.read + errors.write + errors.timeout
   ))
end
