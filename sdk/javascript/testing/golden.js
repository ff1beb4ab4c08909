// Runs the golden cases of a plugin, the same as `querl plugin test`: golden/*.jsonl, one case per line.

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { describe } from "../description.js";
import { Settings } from "../settings.js";
import { Rejection } from "../types.js";
import { declared, styleModel, withCallsTo } from "./builders.js";
import * as form from "./json_form.js";
import { recorded } from "./recorded.js";

const TOLERANCE = 1e-9;

/** The kind of plugin for each kind of case. */
const KIND_OF = {
  episode: "reward",
  episodes: "group-reward",
  samples: "filter",
  task: "prompt",
  parse_rewrite: "prompt",
  parse_judgement: "prompt",
  dialogue: "style-scorer",
};

const SCORE = ["total", "tolerance", "components", "rejected"];

/** Keys of `expect`, by kind of case. */
const EXPECT = {
  episode: SCORE,
  episodes: SCORE,
  samples: ["drop"],
  task: ["contains", "messages"],
  parse_rewrite: ["rewrite", "rejected"],
  parse_judgement: ["score", "reason", "rejected"],
  dialogue: SCORE,
};

const isNumber = (value) => typeof value === "number";

/** Checks of the values in `expect`, by key, with the expected type in words. Other keys have texts. */
const FORM = {
  total: [isNumber, "a number"],
  tolerance: [isNumber, "a number"],
  score: [isNumber, "a number"],
  components: [(value) => typeof value === "object" && Object.values(value).every(isNumber), "an object of numbers"],
  contains: [Array.isArray, "a list of texts"],
  messages: [Array.isArray, "a list of messages"],
};

/** Checks of the values in `settings`, by type, with the type in words. */
const SETTINGS = {
  text: [(value) => typeof value === "string", "a text"],
  number: [isNumber, "a number"],
  integer: [Number.isInteger, "a whole number"],
  flag: [(value) => typeof value === "boolean", "true or false"],
  texts: [(value) => Array.isArray(value) && value.every((entry) => typeof entry === "string"), "a list of texts"],
};

/** Keys of a case other than the key of its input. */
const OTHER_KEYS = ["name", "settings", "input", "style_model", "calls", "expect"];

const WITH_CALLS = ["episode", "episodes", "samples"];

/** The results of external calls in an episode, each with the key that has the result of a success. */
const RESULTS = [
  ["policy", "retrieval", "hits"],
  ["policy", "judgement", "scored"],
  ["baseline", "retrieval", "hits"],
  ["baseline", "judgement", "scored"],
];

/** Kinds of failures of external calls. */
const FAILURES = [
  "timeout",
  "unreachable",
  "unauthorized",
  "rejected",
  "rate_limited",
  "server_error",
  "invalid_response",
  "not_recorded",
  "down",
  "over_budget",
];

export function readGolden(folder) {
  const path = folder instanceof URL ? fileURLToPath(folder) : folder;
  const files = readdirSync(path).filter((name) => name.endsWith(".jsonl")).sort();
  return files.flatMap((name) => form.lines(join(path, name)).map(([place, value]) => goldenCase(place, value)));
}

export function checkGolden(plugin, folder) {
  const cases = readGolden(folder);
  assert.ok(cases.length > 0, `${folder} holds no case`);
  const specs = describe(plugin).settings;
  const known = specs.map((spec) => spec.key);
  const names = known.length > 0 ? `expected one of \`${known.join("`, `")}\`` : "the plugin has no settings";
  for (const each of cases) {
    const unknown = Object.keys(each.settings).find((key) => !known.includes(key));
    assert.ok(!unknown, `${each.place} \`${each.name}\`: unknown setting \`${unknown}\`, ${names}`);
    for (const spec of specs.filter(({ key }) => Object.hasOwn(each.settings, key))) {
      const value = each.settings[spec.key];
      const problem = `expected ${inWords(spec)}, got ${JSON.stringify(value)}`;
      assert.ok(SETTINGS[spec.valueType][0](value), `${each.place} \`${each.name}\`: setting \`${spec.key}\`: ${problem}`);
    }
    const type = plugin.kinds[KIND_OF[each.about]];
    assert.ok(type, `${each.place} \`${each.name}\` is for a ${KIND_OF[each.about]}, which the plugin has not`);
    const returned = withCallsTo(recorded(each.calls), () => answers(new type(new Settings(each.settings)), each));
    const said = `expected ${JSON.stringify(each.expect)}; returned ${JSON.stringify(returned)}`;
    assert.ok(agrees(returned, each), `${each.place} \`${each.name}\`: ${said}`);
  }
  return cases.length;
}

/** The allowed values of a setting, in the words of the host. */
function inWords({ valueType, minimum, maximum, choices }) {
  if (choices?.length > 1) return `${choices.slice(0, -1).join(", ")} or ${choices.at(-1)}`;
  if (choices?.length === 1) return choices[0];
  const [, kind] = SETTINGS[valueType];
  if (minimum !== undefined && maximum !== undefined) return `${kind} from ${minimum} to ${maximum}`;
  if (minimum !== undefined) return `${kind} of ${minimum} or more`;
  return maximum === undefined ? kind : `${kind} of at most ${maximum}`;
}

function goldenCase(place, value) {
  try {
    const fields = new form.Fields(value, "case");
    const name = fields.take("name");
    const about = Object.keys(KIND_OF).find((form) => fields.has(form));
    if (!about) {
      const unknown = Object.keys(value).find((key) => !OTHER_KEYS.includes(key));
      const expected = `expected one of \`${Object.keys(KIND_OF).join("`, `")}\``;
      throw new TypeError(unknown ? `unknown key \`${unknown}\`, ${expected}` : expected);
    }
    const read = {
      place,
      name,
      about,
      settings: fields.optional("settings", {}),
      sent: sent(about, fields.take(about), name),
      input: about === "task" ? form.promptInput(fields.take("input")) : undefined,
      styleModel: about === "dialogue" ? fields.optional("style_model") : undefined,
      calls: WITH_CALLS.includes(about) ? fields.optional("calls", []).map(call) : [],
      expect: fields.take("expect"),
    };
    fields.end();
    for (const each of [read.expect].flat()) {
      if (each !== "keep") checkTypes(form.whole(each, "expect", (fields) => fields.known(...EXPECT[about])));
    }
    return read;
  } catch (error) {
    throw new TypeError(`${place}: ${error.message}`);
  }
}

function checkTypes(expect) {
  for (const [key, got] of Object.entries(expect)) {
    const [isValid, expected] = FORM[key] ?? [(value) => typeof value === "string", "a text"];
    if (!isValid(got)) throw new TypeError(`\`${key}\` in \`expect\` is ${JSON.stringify(got)}; expected ${expected}`);
  }
}

function sent(about, value, name) {
  switch (about) {
    case "episode":
      return episode(value, name, "episode");
    case "episodes":
      return value.map((each, index) => episode(each, `${name}/${index}`, `episodes ${index + 1}`));
    case "samples":
      return value.map((each, index) => form.sample(each, String(index + 1)));
    case "dialogue":
      return form.dialogue(value, name);
    default:
      return value;
  }
}

function episode(value, id, place) {
  for (const [side, key, result] of RESULTS) completeResult(value?.[side]?.[key], result, `${place}.${side}.${key}`);
  return form.episode(value, id);
}

function call(value, index) {
  const read = form.hostCall(value);
  const failed = read.response?.Err?.failed;
  if (failed !== undefined) completeFailure(failed, `calls ${index + 1}.response.Err.failed`);
  return read;
}

/** Throws an error for another form, and fills in the message of a failure. */
function completeResult(value, result, place) {
  const keys = typeof value === "object" && !Array.isArray(value) ? Object.keys(value ?? {}) : [];
  if (keys.length === 1 && keys[0] === "failed") {
    completeFailure(value.failed, `${place}.failed`);
    return;
  }
  const isResult = keys.length === 1 && keys[0] === result;
  const isNone = value === undefined || value === null || (value === "not_sampled" && result === "scored");
  if (isResult || isNone) return;
  throw new TypeError(`\`${place}\` is ${JSON.stringify(value)}; expected an object with \`${result}\` or with \`failed\``);
}

function completeFailure(failure, place) {
  const [kind, message] = form.whole(failure, place, (fields) => [fields.optional("kind", null), fields.optional("message", "")]);
  if (!FAILURES.includes(kind)) {
    throw new TypeError(`\`${place}.kind\` is ${JSON.stringify(kind)}; expected one of \`${FAILURES.join("`, `")}\``);
  }
  if (typeof message !== "string") {
    throw new TypeError(`\`${place}.message\` is ${JSON.stringify(message)}; expected a text`);
  }
  failure.message = message;
}

function answers(plugin, { about, sent, input, styleModel: says }) {
  switch (about) {
    case "episode":
      return attempt(() => plugin.score(declared(sent, plugin.constructor)));
    case "episodes":
      return plugin.scoreGroup(sent.map((each) => declared(each, plugin.constructor)));
    case "samples":
      return sent.map((each) => attempt(() => plugin.check(each)));
    case "task":
      return attempt(() => plugin.messages(sent, input));
    case "parse_rewrite":
      return attempt(() => plugin.parseRewrite(sent));
    case "parse_judgement":
      return attempt(() => plugin.parseJudgement(sent));
    default: {
      const distribution = says && Object.fromEntries(says.map(({ label, probability }) => [label, probability]));
      return attempt(() => plugin.score(sent, styleModel(distribution)));
    }
  }
}

/** The result of the call, or the rejection that it throws. */
export function attempt(call) {
  try {
    return call();
  } catch (error) {
    if (error instanceof Rejection) return error;
    throw error;
  }
}

function agrees(returned, { about, expect }) {
  if (about === "samples") {
    return JSON.stringify(returned.map((each) => (each ? { drop: each.code } : "keep"))) === JSON.stringify(expect);
  }
  if (about === "episodes") {
    return returned.length === expect.length && returned.every((each, index) => isOutcome(each, expect[index]));
  }
  if (returned instanceof Rejection || about === "episode" || about === "dialogue") return isOutcome(returned, expect);
  if (about === "task") {
    if (expect.messages) return JSON.stringify(returned) === JSON.stringify(expect.messages.map(form.message));
    return expect.contains.every((text) => returned.some((message) => message.content.includes(text)));
  }
  if (about === "parse_rewrite") return returned === expect.rewrite;
  return returned.score === expect.score && (expect.reason ?? returned.reason) === returned.reason;
}

function isOutcome(returned, expect) {
  return returned instanceof Rejection ? returned.code === expect.rejected : isScore(returned, expect);
}

function isScore({ total, components = {} }, { total: expected, tolerance = TOLERANCE, components: parts = {} }) {
  const isClose = (value, wanted) => Math.abs(value - wanted) <= tolerance;
  return isClose(total, expected) && Object.entries(parts).every(([name, value]) => isClose(components[name], value));
}
