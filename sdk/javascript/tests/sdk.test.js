import assert from "node:assert/strict";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { Message, nChars, plugin, Rejection, SettingError, Settings, stripped } from "../index.js";
import { candidate, checkContract, checkGolden, dialogue, episode, failed, readEpisodes } from "../testing.js";

class Length {
  constructor(settings) {
    this.scale = settings.number("scale", 10, { minimum: 1, maximum: 100 });
  }
  range() {
    return [0, 1];
  }
  score({ policy }) {
    policy.hits("policy");
    return { total: Math.min(policy.rewrite.length / this.scale, 1), components: { n_chars: policy.rewrite.length } };
  }
}

const LENGTH = plugin({ reward: Length });
const withMethod = (name, method) => {
  class Changed extends Length {}
  Changed.prototype[name] = method;
  return plugin({ reward: Changed });
};

function folderWith(name, ...lines) {
  const folder = mkdtempSync(join(tmpdir(), "querl-sdk-"));
  writeFileSync(join(folder, name), lines.map((line) => `${JSON.stringify(line)}\n`).join(""));
  return folder;
}

const GOLDEN = { name: "四个字", episode: { query: "鱼油", policy: { rewrite: "深海鱼油" }, baseline: { rewrite: "鱼油" } } };

test("absent settings give the defaults and settings read back", () => {
  const none = new Settings();
  assert.deepEqual([none.number("a", 0.5), none.flag("b", true), none.texts("c", ["x"])], [0.5, true, ["x"]]);
  const set = new Settings({ a: 0.25, b: false, c: ["虾青素"], d: 7, e: "drop" });
  const read = [set.number("a", 1), set.flag("b", true), set.texts("c"), set.integer("d", 1), set.choice("e", "keep", ["keep", "drop"])];
  assert.deepEqual(read, [0.25, false, ["虾青素"], 7, "drop"]);
});

test("unusable settings name the key, what was expected and what came", () => {
  const settings = new Settings({ a: "high", b: "", c: "yes", d: "虾青素", e: "0x10", f: 1.5, g: 11 });
  const refused = (read, expected) => assert.throws(read, (error) => error instanceof SettingError && error.problem === expected);
  refused(() => settings.number("a", 1, { minimum: 0, maximum: 1 }), "expected a number from 0 to 1, got `high`");
  refused(() => settings.number("b", 1), "expected a number, got ``");
  refused(() => settings.flag("c", true), "expected true or false, got `yes`");
  refused(() => settings.texts("d"), "expected a list of texts, got `虾青素`");
  refused(() => settings.number("e", 1), "expected a number, got `0x10`");
  refused(() => settings.integer("f", 1, { minimum: 0 }), "expected a whole number of at least 0, got `1.5`");
  refused(() => settings.choice("g", "x", ["x", "y"]), "expected one of `x`, `y`, got `11`");
});

test("plugin() refuses what is no plugin in words that say what to do", () => {
  assert.throws(() => plugin({}), /names no class; expected for example/);
  assert.throws(() => plugin({ rewards: Length }), /the kinds are prompt, filter, reward, styleScorer/);
  assert.throws(() => plugin({ filter: Length }), /`Length` has no method `check`, which a filter needs/);
});

test("rejection codes are checked where they are made", () => {
  assert.throws(() => new Rejection("Not Good"), /expected 1 to 64 of a to z, 0 to 9 and _/);
  assert.equal(new Rejection("too_long", "41 characters").message, "too_long: 41 characters");
});

test("a failed call is a rejection that names the side", () => {
  const failing = episode("胶原咋吃", candidate("胶原", failed("late")));
  assert.throws(() => new Length(new Settings()).score(failing), (error) => error.code === "policy_retrieval_failed" && error.detail === "late");
});

test("characters are counted once whatever their plane, and stripped at the ends only", () => {
  assert.deepEqual(["", "虾青素", "𠮷a👩"].map(nChars), [0, 3, 3]);
  assert.equal(stripped(" “胶原 蛋白”", " “”"), "胶原 蛋白");
  assert.equal(stripped("“”", "“”"), "");
});

test("a dialogue ends with the assistant", () => {
  const roles = (...texts) => dialogue(...texts).turns.map((turn) => turn.role);
  assert.deepEqual(roles("在吗", "在的"), ["user", "assistant"]);
  assert.deepEqual(roles("您好"), ["assistant"]);
  assert.deepEqual(Message.system("x"), new Message("system", "x"));
});

test("golden cases pass and a wrong one is named with what came back", () => {
  const reward = LENGTH;
  const right = { ...GOLDEN, settings: { scale: 8 }, expect: { total: 0.5, components: { n_chars: 4 } } };
  assert.equal(checkGolden(reward, folderWith("a.jsonl", right)), 1);
  const wrong = { ...GOLDEN, expect: { total: 0.5 } };
  assert.throws(() => checkGolden(reward, folderWith("a.jsonl", right, wrong)), /a.jsonl:2 `四个字`: returned .*0.4.*; expected .*0.5/);
  const odd = { ...GOLDEN, expekt: {} };
  assert.throws(() => checkGolden(reward, folderWith("a.jsonl", odd)), /a.jsonl:1: `expect` is missing in `case`/);
});

test("the contract's checks find each breach", () => {
  checkContract(LENGTH);
  assert.throws(() => checkContract(withMethod("score", () => ({ total: 2 }))), /a total from 0 to 1/);
  assert.throws(() => checkContract(withMethod("score", () => ({ total: NaN }))), /a total from 0 to 1/);
  assert.throws(() => checkContract(withMethod("score", () => ({ total: 0, components: { "A b": 1 } }))), /a component name/);
  assert.throws(() => checkContract(withMethod("score", () => ({ total: 0, components: { a: Infinity } }))), /a finite component/);
  assert.throws(() => checkContract(withMethod("range", () => [1, 1])), /the first below the second/);
  let n = 0;
  assert.throws(() => checkContract(withMethod("score", () => ({ total: (n += 1) % 2 }))), /no state between items/);
});

test("recorded episodes are read and other formats are refused", () => {
  const line = { format: 2, episode: { ...GOLDEN.episode, id: "a", context: { user_profile: "孕妇" } }, outcome: { scored: { total: 1 } } };
  const [episode] = readEpisodes(join(folderWith("e.jsonl", line), "e.jsonl"));
  assert.deepEqual([episode.id, episode.context.userProfile, episode.policy.hits("policy")], ["a", "孕妇", []]);
  assert.throws(() => readEpisodes(join(folderWith("e.jsonl", { ...line, format: 1 }), "e.jsonl")), /e.jsonl:1: expected "format": 2/);
});
