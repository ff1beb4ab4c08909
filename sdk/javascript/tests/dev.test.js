import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const SDK = new URL("../index.js", import.meta.url);
const DEV = fileURLToPath(new URL("../dev.js", import.meta.url));

/** The lines of results of `dev.js`, without the `begun` lines, for a plugin with these source files (by path). */
function dev(sources, recorded, settings = {}, env = {}) {
  const folder = realpathSync(mkdtempSync(join(tmpdir(), "querl-dev-")));
  try {
    return devIn(folder, sources, recorded, settings, env);
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function devIn(folder, sources, recorded, settings, env) {
  for (const [path, text] of Object.entries({ "package.json": '{"type": "module"}', ...sources })) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), text.replaceAll("#querl-sdk", SDK));
  }
  const [episodes, results] = ["episodes.jsonl", "results.jsonl"].map((name) => join(folder, name));
  writeFileSync(episodes, recorded.map((line) => `${JSON.stringify(line)}\n`).join(""));
  try {
    execFileSync(process.execPath, [DEV, folder, episodes, JSON.stringify(settings), results], { stdio: "pipe", env: { ...process.env, ...env } });
  } catch (error) {
    // `dev_watch.js` ends the process by SIGKILL.
    if (error.signal !== "SIGKILL") throw error;
  }
  return readFileSync(results, "utf8").trim().split("\n").map((line) => JSON.parse(line)).filter((line) => !("begun" in line));
}

/** The results of the episodes, without range and time. */
function scores(sources, recorded, settings, env) {
  return dev(sources, recorded, settings, env).slice(1, -1);
}

const line = (query, more = {}, calls = []) => ({ format: 3, step: 0, episode: { id: query, query, policy: {}, ...more }, calls });
const scored = (total, ...components) => ({ scored: { total, components: components.map(([name, value]) => ({ name, value })) } });

const LENGTH = `import { Rejection, log, plugin } from "#querl-sdk";
import { share } from "./parts/share.js";

class Length {
  constructor(settings) {
    this.maxChars = settings.number("max_chars", 10, { minimum: 1, maximum: 100 });
  }
  range() {
    return [0, 1];
  }
  score({ query, policy }) {
    if (query === "reject") throw new Rejection("no_refund", "退钱");
    if (query === "nothing") return undefined;
    if (query === "nan") return { total: 0, components: { share: NaN } };
    if (query === "log") log.warn("seen");
    return { total: share(policy.rewrite, this.maxChars), components: { max: this.maxChars } };
  }
}

export default plugin({ reward: Length });
`;
const SHARE = `export function share(text, max) {
  return text.length / max;
}
`;

test("dev: scores, rejections, faults with the author's file and line, and logs", () => {
  const policy = { rewrite: "深海鱼油" };
  const queries = ["log", "reject", "nothing", "nan", "plain"].map((query) => line(query, { policy }));
  const results = dev({ "plugin.js": LENGTH, "parts/share.js": SHARE }, [...queries, line("none")], { max_chars: 8 });
  assert.deepEqual(results.slice(0, -1), [
    { range: [0, 1] },
    { ...scored(0.5, ["max", 8]), log: ["warn: seen"] },
    { rejected: { code: "no_refund", detail: "退钱" } },
    { fault: { message: "the result is undefined; expected { total, components }" } },
    { fault: { message: "`share` is NaN; expected a finite number" } },
    scored(0.5, ["max", 8]),
    { fault: { message: "TypeError: Cannot read properties of undefined (reading 'length')", file: join("parts", "share.js"), line: 2 } },
  ]);
  assert.ok(results.at(-1).seconds > 0);
});

test("dev: a fault inside of a vendored module has the line that called it", () => {
  const source = LENGTH.replace("./parts/share.js", "./vendor/share.js");
  const [{ fault }] = scores({ "plugin.js": source, "vendor/share.js": SHARE }, [line("none")]);
  assert.deepEqual([fault.file, fault.line], ["plugin.js", 16]);
});

test("dev: what keeps a plugin from being run is the only line", () => {
  const refused = (source, settings) => {
    const results = dev({ "plugin.js": source, "parts/share.js": SHARE }, [line("plain")], settings);
    assert.equal(results.length, 1);
    return results[0].refused;
  };
  assert.deepEqual(refused(LENGTH, { max_chars: 0 }), { message: "setting `max_chars`: expected a number from 1 to 100, got `0`" });
  const broken = refused(LENGTH.replace("return [0, 1];", "return [0, 1;"));
  assert.deepEqual([broken.file, broken.line], ["plugin.js", 9]);
  const throwing = refused(LENGTH.replace("this.maxChars =", "this.maxChars = settings.nothing.here +"));
  assert.deepEqual([throwing.file, throwing.line], ["plugin.js", 6]);
  assert.match(refused("export default 1;").message, /plugin.js exports no reward/);
  const filter = 'import { plugin } from "#querl-sdk";\nexport default plugin({ filter: class { check() {} } });';
  assert.match(refused(filter).message, /plugin.js exports no reward/);
});

const PARTS = `import { plugin } from "#querl-sdk";

class Parts {
  static requires = REQUIRES;
  static uses = USES;
  range() {
    return [0, 1];
  }
  score({ response, prompt, columns, policy, baseline }) {
    const has = (value) => (value === undefined ? 0 : 1);
    const { retrieval, judgement, style } = policy;
    const [ofColumns, ofBaseline] = [columns.price, baseline?.judgement];
    const parts = { response, prompt, columns: ofColumns, baseline, of_baseline: ofBaseline, retrieval, judgement, style };
    return { total: 0, components: Object.fromEntries(Object.entries(parts).map(([name, value]) => [name, has(value)])) };
  }
}

export default plugin({ reward: Parts });
`;

test("dev: a plugin sees the parts of an episode that it declares and no others", () => {
  const side = { retrieval: { hits: [] }, judgement: { scored: { score: 4, reason: "" } }, style: [{ label: "售前", probability: 1 }] };
  const whole = line("a", { response: "无", prompt: [{ role: "user", content: "问" }], columns: { price: 3 }, policy: side, baseline: side });
  const seen = (requires, uses) => {
    const source = PARTS.replace("REQUIRES", JSON.stringify(requires)).replace("USES", JSON.stringify(uses));
    const [{ scored }] = scores({ "plugin.js": source }, [whole]);
    return scored.components.filter(({ value }) => value === 1).map(({ name }) => name);
  };
  assert.deepEqual(seen([], []), []);
  assert.deepEqual(seen(["columns"], ["judgement"]), ["columns", "judgement"]);
  assert.deepEqual(seen(["baseline", "style"], ["response", "prompt"]), ["response", "prompt", "baseline", "style"]);
  assert.deepEqual(seen(["baseline", "judgement"], ["retrieval"]), ["baseline", "of_baseline", "retrieval", "judgement"]);
});

test("dev: recorded episodes of format 2 are read", () => {
  const recorded = readFileSync(new URL("../../../tests/episodes/format-2.jsonl", import.meta.url), "utf8").trim().split("\n");
  const source = PARTS.replace("REQUIRES", '["retrieval", "baseline"]').replace("USES", "[]");
  for (const { scored } of scores({ "plugin.js": source }, recorded.map((line) => JSON.parse(line)))) {
    const seen = scored.components.filter(({ value }) => value === 1).map(({ name }) => name);
    assert.deepEqual(seen, ["baseline", "retrieval"]);
  }
});

const DISTINCT = `import { Rejection, log, plugin } from "#querl-sdk";

class Distinct {
  range() {
    return [0, 1];
  }
  scoreGroup(episodes) {
    const rewrites = episodes.map(({ policy }) => policy.rewrite);
    if (rewrites.includes("reject")) throw new Rejection("bad_group", "");
    if (rewrites.includes("fault")) return rewrites.nothing.here;
    if (rewrites.includes("few")) return [];
    log.info(rewrites.join(" "));
    const count = (rewrite) => rewrites.filter((other) => other === rewrite).length;
    return rewrites.map((rewrite) => (rewrite ? { total: 1 / count(rewrite) } : new Rejection("no_rewrite")));
  }
}

export default plugin({ groupReward: Distinct });
`;

test("dev: a group reward gets all episodes of a group, wherever they are in the file", () => {
  const groups = { a: ["x", "y", "x"], b: ["x", ""], c: ["reject", "x"], d: ["fault", "x"], e: ["few", "x"] };
  const member = (group, index) => line("q", { id: `${group}/${index}`, group_id: group, sample_index: index, policy: { rewrite: groups[group][index] } });
  const order = ["a/0", "b/0", "a/1", "b/1", "a/2", "c/0", "c/1", "d/0", "d/1", "e/0", "e/1"].map((id) => id.split("/"));
  const results = scores({ "plugin.js": DISTINCT }, order.map(([group, index]) => member(group, Number(index))));
  const fault = { fault: { message: "TypeError: Cannot read properties of undefined (reading 'here')", file: "plugin.js", line: 10 } };
  const few = { fault: { message: "scoreGroup() gave 0 results for 2 episodes; expected one for each" } };
  const rejected = { rejected: { code: "bad_group", detail: "" } };
  assert.deepEqual(results, [
    { ...scored(0.5), log: ["info: x y x"] },
    { ...scored(1), log: ["info: x "] },
    scored(1),
    { rejected: { code: "no_rewrite", detail: "" } },
    scored(0.5),
    ...[rejected, rejected, fault, fault, few, few],
  ]);
});

const CALLS = `import { Message, host, plugin } from "#querl-sdk";

class Calls {
  range() {
    return [-1, 1];
  }
  score({ query }) {
    switch (query) {
      case "judge":
        return { total: Number(host.askJudge([Message.system("rate"), Message.user("鱼油")])) };
      case "style":
        return { total: host.classify([Message.user("鱼油")])[0].probability };
      case "embed":
        return { total: host.embed(["鱼油", "油"])[1][0] };
      case "words":
        return { total: host.words("鱼油").length / 10 };
      default:
        return { total: host.countTokens("鱼油") / 10, components: { split: host.splitTokens("鱼油").length } };
    }
  }
}

export default plugin({ reward: Calls });
`;

test("dev: host functions have the recorded results, failures included", () => {
  const call = (request, response) => ({ plugin: "p", request, response });
  const messages = [{ role: "system", content: "rate" }, { role: "user", content: "鱼油" }];
  const recorded = {
    tokens: [call({ split_tokens: "鱼油" }, { Ok: { texts: ["鱼", "油"] } }), call({ count_tokens: "鱼油" }, { Ok: { count: 2 } })],
    judge: [call({ ask_judge: messages.slice(1) }, { Ok: { text: "0" } }), call({ ask_judge: messages }, { Ok: { text: "0.75" } })],
    style: [call({ classify_style: messages.slice(1) }, { Ok: { style: [{ label: "售前", probability: 0.25 }] } })],
    embed: [call({ embed: ["鱼油", "油"] }, { Ok: { vectors: [[1], [0.1]] } })],
    words: [call({ segment_words: "油" }, { Ok: { texts: ["油"] } })],
  };
  const lines = Object.entries(recorded).map(([query, calls]) => line(query, {}, calls));
  assert.deepEqual(scores({ "plugin.js": CALLS }, lines), [
    scored(0.2, ["split", 2]),
    scored(0.75),
    scored(0.25),
    // f32, as in a component.
    scored(Math.fround(0.1)),
    { rejected: { code: "words_failed", detail: "the recording has no result for this call" } },
  ]);
  const failing = (response) => scores({ "plugin.js": CALLS }, [line("judge", {}, [call({ ask_judge: messages }, response)])])[0].rejected;
  const failed = { Err: { failed: { kind: "timeout", message: "no response within 30 s" } } };
  assert.deepEqual(failing(failed), { code: "judge_failed", detail: "no response within 30 s" });
  assert.equal(failing({ Err: "not_configured" }).code, "judge_not_configured");
});

test("dev: an episode that does not end is a fault, and the others are scored", () => {
  // Symptom: a run hung without a message in a regular expression with catastrophic backtracking.
  const source = LENGTH.replace('if (query === "log")', 'if (query === "hangs") /^(a+)+$/.test("a".repeat(40) + "b");\n    if (query === "log")');
  const recorded = ["plain", "hangs", "plain"].map((query) => line(query, { policy: { rewrite: "深海鱼油" } }));
  const message = "still ran after 5 s: an endless loop, or a regular expression that tries too many ways";
  assert.deepEqual(scores({ "plugin.js": source, "parts/share.js": SHARE }, recorded), [
    scored(0.4, ["max", 10]),
    { fault: { message } },
    scored(0.4, ["max", 10]),
  ]);
});

test("dev: a module that does not end to load is refused with its line", () => {
  // Symptom: a run hung without a message in an endless loop at the top level of a module.
  const share = `${SHARE}\nfor (let n = 0; ; n += 1) {\n  Math.sqrt(n);\n}\n`;
  const [{ refused }] = dev({ "plugin.js": LENGTH, "parts/share.js": share }, [line("plain")]);
  assert.equal(refused.message, "plugin.js still loads after 5 s: an endless loop or await at the top level of a module");
  const first = SHARE.split("\n").length + 1;
  assert.equal(refused.file, join("parts", "share.js"));
  assert.ok(refused.line >= first && refused.line <= first + 2, refused.line);
});

test("dev: an undeclared host function is the fault of the component", () => {
  // Symptom: a call of an undeclared interface was natively a rejection, `words_failed`.
  const [{ fault }] = scores({ "plugin.js": CALLS }, [line("words")], {}, { QUERL_HOST_FUNCTIONS: "tokens" });
  assert.equal(fault.message, "TypeError: `host` needs the interface `words`; add it to host_functions in plugin.toml");
  assert.equal(fault.line, 16);
  assert.ok("rejected" in scores({ "plugin.js": CALLS }, [line("words")], {}, { QUERL_HOST_FUNCTIONS: "tokens words" })[0]);
});

test("dev: a range of what is no number is refused", () => {
  const source = LENGTH.replace("[0, 1]", "[0, Infinity]");
  const [{ refused }] = dev({ "plugin.js": source, "parts/share.js": SHARE }, [line("plain")]);
  assert.match(refused.message, /declares the range 0 to Infinity; expected two finite numbers/);
});

test("dev: a range that is not two numbers is named", () => {
  // Symptom: the line of the range could not be read, which ended the command.
  const refused = (text) => dev({ "plugin.js": LENGTH.replace("[0, 1]", text), "parts/share.js": SHARE }, [line("plain")])[0].refused;
  for (const [returned, words] of [["1.0", "1"], ['["0", 1]', '["0", 1]'], ["[0, 1, 2]", "[0, 1, 2]"]]) {
    const message = `TypeError: \`Length.range\` returned ${words}; expected two numbers [low, high]`;
    assert.deepEqual(refused(returned), { message });
  }
});

test("dev: a total or component of another type is named with its type", () => {
  // Symptom: "`total` is 0.5; expected a finite number" for the text "0.5".
  for (const [score, message] of [
    ['{ total: "0.5" }', '`total` is "0.5", a text; expected a finite number'],
    ["{ total: 1n }", "`total` is 1n, a BigInt; expected a finite number"],
    ["{ total: 0, components: { a: null } }", "`a` is null; expected a finite number"],
    ['{ total: 0, components: [["a", 1]] }', '`components` is [["a", 1]]; expected an object with a number for each name'],
  ]) {
    const source = LENGTH.replace('if (query === "log")', `return ${score};\n    if (query === "log")`);
    assert.deepEqual(scores({ "plugin.js": source, "parts/share.js": SHARE }, [line("plain")]), [{ fault: { message } }]);
  }
});
