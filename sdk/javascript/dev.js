// Scores recorded episodes natively, for `querl plugin dev`: one process for each save, so that every module is loaded afresh.
//
// `node dev.js FOLDER EPISODES SETTINGS RESULTS`: the plugin's folder, a file of recorded episodes, the settings as JSON, and the file to
// write. A line of results is a JSON object: first `{"range": [low, high]}`, then for each episode `{"scored": ...}`, `{"rejected": ...}` or
// `{"fault": {"message", "file", "line"}}`, with its log lines under `log`, and last `{"seconds": ...}`, the time that scoring took. Where
// the plugin cannot be loaded or refuses a setting, `{"refused": {"message", "file", "line"}}` is the only line.

import { writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { sendLogTo } from "./log.js";
import { SettingError, Settings } from "./settings.js";
import { readEpisodes } from "./testing/json_form.js";
import { Rejection } from "./types.js";

async function resultsOf(folder, episodes, settings) {
  let plugin, range;
  try {
    const { default: exported } = await import(pathToFileURL(join(folder, "plugin.js")));
    const Reward = exported?.kinds?.reward;
    if (Reward === undefined) throw new TypeError("plugin.js exports no reward");
    plugin = new Reward(new Settings(settings));
    range = plugin.range();
  } catch (error) {
    return [{ refused: error instanceof SettingError ? { message: error.message } : place(error, folder) }];
  }
  const given = readEpisodes(episodes);
  let written = [];
  sendLogTo((level, message) => written.push(`${level}: ${message}`));
  const results = [{ range }];
  let milliseconds = 0;
  for (const episode of given) {
    const started = performance.now();
    const result = scored(plugin, episode, folder);
    milliseconds += performance.now() - started;
    if (written.length > 0) {
      result.log = written;
      written = [];
    }
    results.push(result);
  }
  return [...results, { seconds: milliseconds / 1000 }];
}

function scored(plugin, episode, folder) {
  let score;
  try {
    score = plugin.score(episode);
  } catch (error) {
    if (error instanceof Rejection) return { rejected: { code: error.code, detail: error.detail } };
    return { fault: place(error, folder) };
  }
  if (typeof score !== "object" || score === null) {
    return { fault: { message: `score() returned ${String(score)}; expected { total, components }` } };
  }
  const { total, components = {} } = score;
  for (const [name, value] of [["total", total], ...Object.entries(components)]) {
    if (!Number.isFinite(value)) return { fault: { message: `\`${name}\` is ${String(value)}; expected a finite number` } };
  }
  const parts = Object.entries(components).map(([name, value]) => ({ name, value }));
  return { scored: { total, components: parts } };
}

/** The message, and the innermost line of the author's own source. */
function place(error, folder) {
  const message = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
  // A syntax error has its place in the first line of the stack, others have one in each line.
  for (const line of String(error?.stack ?? "").split("\n")) {
    const [, url, number] = /(file:\/\/[^\s)]+?):(\d+)(?::\d+)?\)?$/.exec(line.trim()) ?? [];
    if (url === undefined) continue;
    const file = relative(folder, fileURLToPath(url));
    const isOwn = !file.startsWith("..") && !file.split(sep).some((part) => part === "vendor" || part === "node_modules");
    if (isOwn) return { message, file, line: Number(number) };
  }
  return { message };
}

const [folder, episodes, settings, results] = process.argv.slice(2);
const lines = await resultsOf(folder, episodes, JSON.parse(settings));
writeFileSync(results, lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
