// Worker thread that enforces the time limit while `dev.js` loads plugin.js: `node:vm` cannot limit the top level of a module.
//
// `workerData` has the plugin's folder, the path of the results and the limit in milliseconds. After the limit the thread writes the line
// that is being executed as `{"refused": {"message", "file", "line"}}` and ends the process.

import { appendFileSync } from "node:fs";
import { Session } from "node:inspector";
import { relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { workerData } from "node:worker_threads";

/** Timeout in milliseconds for the stack trace of the main thread. */
const ANSWER_MS = 1000;

const { folder, results, limitMs } = workerData;

function end(place) {
  const message = `plugin.js still loads after ${limitMs / 1000} s: an endless loop or await at the top level of a module`;
  appendFileSync(results, `${JSON.stringify({ refused: { message, ...place } })}\n`);
  process.kill(process.pid, "SIGKILL");
}

/** The innermost line in the plugin's source. */
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
