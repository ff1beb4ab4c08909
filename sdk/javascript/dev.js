// Scores recorded episodes natively, for `querl plugin dev`, which starts a new process after each save of the source.
//
// `node dev.js FOLDER EPISODES SETTINGS RESULTS`: the plugin's folder, a file of recorded episodes, the settings as JSON, and the file to
// write. A line of results is a JSON object: first `{"range": [low, high]}`; `{"begun": id}` before each episode or group, as it begins; then
// for each episode `{"scored": ...}`, `{"rejected": ...}` or `{"fault": {"message", "file", "line"}}`, with its log lines under `log`; and
// last `{"seconds": ...}`, the time that scoring took. Where the plugin cannot be loaded or refuses a setting,
// `{"refused": {"message", "file", "line"}}` is the only line. The environment variable `QUERL_HOST_FUNCTIONS` has the interfaces that
// plugin.toml declares.

import { spawnSync } from "node:child_process";
import { openSync, writeSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { Script } from "node:vm";
import { Worker } from "node:worker_threads";
import { describe, rangeOf } from "./description.js";
import { notDeclared, sendCallsTo } from "./host.js";
import { sendLogTo } from "./log.js";
import { SettingError, Settings } from "./settings.js";
import { readRecorded } from "./testing/json_form.js";
import { recorded as recordedCalls } from "./testing/recorded.js";
import { Rejection, notFinite, notNamed, shown } from "./types.js";

const MODULE = "plugin.js";

/** Time limit in milliseconds for an episode or group, for loading plugin.js, and for constructor and range(). Exceeding it is a fault. */
const LIMIT_MS = 5000;
/** Scoring stops after this many timeouts. */
const MAX_STOPPED = 3;
/** Episodes are scored in slices of this many milliseconds, because setting a time limit takes about a quarter of a millisecond. */
const SLICE_MS = 100;
const STILL_RUNS = `still ran after ${LIMIT_MS / 1000} s: an endless loop, or a regular expression that tries too many ways`;

const JOB = Symbol.for("querl.job");
const SCRIPT = new Script('globalThis[Symbol.for("querl.job")]()');

/** Runs `job` with a time limit and returns its result. `node:vm` can interrupt loops and regular expressions. */
function withinLimit(job) {
  globalThis[JOB] = job;
  try {
    return SCRIPT.runInThisContext({ timeout: LIMIT_MS });
  } catch (error) {
    throw error?.code === "ERR_SCRIPT_EXECUTION_TIMEOUT" ? STILL_RUNS : error;
  }
}

/** Loads plugin.js. If that exceeds the limit, `dev_watch.js` writes the error to `results` and ends the process. */
async function load(folder, results) {
  const watch = new Worker(new URL("dev_watch.js", import.meta.url), { workerData: { folder, results, limitMs: LIMIT_MS } });
  watch.unref();
  try {
    return await import(pathToFileURL(join(folder, MODULE)));
  } finally {
    watch.terminate();
  }
}

/** Scores the episodes. Calls `begin` with the id of each episode before it is scored. */
async function resultsOf(folder, file, settings, resultsFile, begin) {
  let plugin, inputs, range, isOfGroup;
  try {
    const { default: exported } = await load(folder, resultsFile);
    const type = exported?.kinds?.reward ?? exported?.kinds?.["group-reward"];
    if (type === undefined) throw new TypeError("plugin.js exports no reward");
    isOfGroup = "group-reward" in exported.kinds;
    withinLimit(() => {
      ({ inputs } = describe(exported));
      plugin = new type(new Settings(settings));
      range = rangeOf(plugin);
    });
    if (!range.every(Number.isFinite)) {
      throw new RangeError(`declares the range ${range.join(" to ")}; expected two finite numbers, the first below the second`);
    }
  } catch (error) {
    return [{ refused: error instanceof SettingError ? { message: error.message } : place(error, folder) }];
  }
  const recorded = readRecorded(file);
  const groups = new Map();
  for (const [index, { episode }] of recorded.entries()) {
    const group = isOfGroup ? episode.groupId : index;
    groups.set(group, [...(groups.get(group) ?? []), index]);
    strip(episode.json, inputs);
  }
  let written = [];
  sendLogTo((level, message) => written.push(`${level}: ${message}`));
  const results = Array(recorded.length);
  let milliseconds = 0;
  const score = (members) => {
    begin(recorded[members[0]].episode.id);
    const episodes = members.map((index) => recorded[index].episode);
    sendCallsTo(declaredOnly(recordedCalls(members.flatMap((index) => recorded[index].calls))));
    const started = performance.now();
    const outcomes = outcomesOf(plugin, isOfGroup, episodes, folder);
    milliseconds += performance.now() - started;
    keep(members, outcomes);
  };
  const keep = (members, outcomes) => {
    for (const [position, index] of members.entries()) results[index] = outcomes[position];
    if (written.length > 0) {
      results[members[0]].log = written;
      written = [];
    }
  };
  const all = [...groups.values()];
  let next = 0;
  let stopped = 0;
  while (next < all.length && stopped < MAX_STOPPED) {
    try {
      withinLimit(() => {
        const end = performance.now() + SLICE_MS;
        for (; next < all.length && performance.now() < end; next += 1) score(all[next]);
      });
    } catch (error) {
      if (error !== STILL_RUNS) throw error;
      keep(all[next], all[next].map(() => ({ fault: { message: STILL_RUNS } })));
      next += 1;
      stopped += 1;
    }
  }
  const message = `not scored: ${stopped} before it still ran after ${LIMIT_MS / 1000} s`;
  for (const members of all.slice(next)) keep(members, members.map(() => ({ fault: { message } })));
  return [{ range }, ...results, { seconds: milliseconds / 1000 }];
}

/** Refuses a host function that plugin.toml does not declare, with the same message as in the component. */
function declaredOnly(call) {
  const declared = process.env.QUERL_HOST_FUNCTIONS?.split(" ");
  return (functions, method, argument) => {
    if (declared && !declared.includes(functions)) throw notDeclared(functions);
    return call(functions, method, argument);
  };
}

/** Removes the inputs that the plugin does not declare from an episode, as the host does. */
function strip(episode, inputs) {
  for (const part of ["response", "prompt", "columns", "baseline"]) {
    if (!(part in inputs)) delete episode[part];
  }
  for (const side of [episode.policy, episode.baseline ?? {}]) {
    for (const part of ["retrieval", "judgement", "style"]) {
      if (!(part in inputs)) delete side[part];
    }
  }
}

function outcomesOf(plugin, isOfGroup, episodes, folder) {
  let outcomes;
  try {
    outcomes = isOfGroup ? plugin.scoreGroup(episodes) : [plugin.score(episodes[0])];
  } catch (error) {
    return episodes.map(() => (error instanceof Rejection ? rejected(error) : { fault: place(error, folder) }));
  }
  if (outcomes?.length !== episodes.length) {
    const message = `scoreGroup() gave ${outcomes?.length ?? "no"} results for ${episodes.length} episodes; expected one for each`;
    return episodes.map(() => ({ fault: { message } }));
  }
  return outcomes.map((outcome) => (isOfGroup && outcome instanceof Rejection ? rejected(outcome) : scored(outcome)));
}

function rejected({ code, detail }) {
  return { rejected: { code, detail } };
}

function scored(score) {
  if (typeof score !== "object" || score === null) {
    return { fault: { message: `the result is ${shown(score)}; expected { total, components }` } };
  }
  const total = score.total;
  const components = score.components ?? {};
  if (Array.isArray(components)) return { fault: { message: notNamed(components) } };
  for (const [name, value] of [["total", total], ...Object.entries(components)]) {
    if (!Number.isFinite(value)) return { fault: { message: notFinite(name, value) } };
  }
  const parts = Object.entries(components).map(([name, value]) => ({ name, value }));
  return { scored: { total, components: parts } };
}

/** The message of an error, with file and line of the innermost frame in the plugin's own source. */
function place(error, folder) {
  const message = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
  let found = ownLine(String(error?.stack ?? ""), folder);
  if (!found && error instanceof SyntaxError) {
    // Node.js reports the location of a syntax error in a module only if the error ends the process.
    found = ownLine(spawnSync(process.execPath, [join(folder, MODULE)], { encoding: "utf8" }).stderr, folder);
  }
  return { message, ...found };
}

/** The first line of a stack trace that is in the plugin's source. */
function ownLine(stack, folder) {
  for (const line of stack.split("\n")) {
    // A syntax error has its location in the first line of the stack trace, other errors in each line.
    const [, url, number] = /(file:\/\/[^\s)]+?):(\d+)(?::\d+)?\)?$/.exec(line.trim()) ?? [];
    if (url === undefined) continue;
    const file = relative(folder, fileURLToPath(url));
    const isOwn = !file.startsWith("..") && !file.split(sep).some((part) => part === "vendor" || part === "node_modules");
    if (isOwn) return { file, line: Number(number) };
  }
  return undefined;
}

const [folder, episodes, settings, results] = process.argv.slice(2);
const output = openSync(results, "w");
const write = (lines) => writeSync(output, lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
const lines = await resultsOf(folder, episodes, JSON.parse(settings), results, (begun) => write([{ begun }]));
write(lines);
