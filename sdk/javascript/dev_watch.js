// A thread next to `dev.js` while plugin.js loads: `node:vm` gives the top level of a module no limit, and its own thread cannot interrupt it.
//
// `workerData` has the plugin's folder, the file of results and the limit in milliseconds. After it, the line that runs is written as
// `{"refused": {"message", "file", "line"}}`, and the process ends.

import { appendFileSync } from "node:fs";
import { Session } from "node:inspector";
import { relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { workerData } from "node:worker_threads";

/** Milliseconds that the main thread may take to say where it is. */
const ANSWER_MS = 1000;

const { folder, results, limitMs } = workerData;

function end(place) {
  const message = `plugin.js still loads after ${limitMs / 1000} s: an endless loop or await at the top level of a module`;
  appendFileSync(results, `${JSON.stringify({ refused: { message, ...place } })}\n`);
  process.kill(process.pid, "SIGKILL");
}

/** The innermost line of the author's source. */
function ownLine(callFrames, urls) {
  for (const { location } of callFrames) {
    const url = urls.get(location.scriptId) ?? "";
    if (!url.startsWith("file:")) continue;
    const file = relative(folder, fileURLToPath(url));
    const isOwn = !file.startsWith("..") && !file.split(sep).some((part) => part === "vendor" || part === "node_modules");
    if (isOwn) return { file, line: location.lineNumber + 1 };
  }
  return undefined;
}

setTimeout(() => {
  const urls = new Map();
  const session = new Session();
  session.connectToMainThread();
  session.on("Debugger.scriptParsed", ({ params }) => urls.set(params.scriptId, params.url));
  session.on("Debugger.paused", ({ params }) => end(ownLine(params.callFrames, urls)));
  session.post("Debugger.enable");
  session.post("Debugger.pause");
  setTimeout(end, ANSWER_MS);
}, limitMs);
