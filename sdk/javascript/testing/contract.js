// Checks of the plugin contract that need no component. `querl plugin test` checks the component more completely. These checks take
// about a second and run under a debugger.

import assert from "node:assert/strict";
import { isDeepStrictEqual } from "node:util";
import { rangeOf } from "../description.js";
import { Settings } from "../settings.js";
import { Message, Rejection } from "../types.js";
import { candidate, declared, dialogue, episode, failed, sample, styleModel, withHostFunctions } from "./builders.js";
import { attempt } from "./golden.js";

// Empty, blank, Chinese, outside of the basic multilingual plane, right to left, control characters, markup, long.
const TEXTS = ["", " \n", "胶原蛋白肽怎么吃", "👩‍⚕️𠮷", "שלום", "a\u0000b\u202e", "<b>{}</b>\\\"'", "虾青素。".repeat(20_000)];
const TASKS = ["teacher_rewrite", "policy_rewrite", "judge"];
const CHECKS = {
  reward: checkReward,
  "group-reward": checkGroupReward,
  filter: checkFilter,
  prompt: checkPrompt,
  "style-scorer": checkStyleScorer,
};

export function checkContract(plugin, settings = {}) {
  withHostFunctions({ askJudge: () => "3" }, () => {
    for (const [kind, type] of Object.entries(plugin.kinds)) CHECKS[kind](() => new type(new Settings(settings)));
  });
}

function checkRange(make) {
  const [low, high] = rangeOf(make());
  const finite = Number.isFinite(low) && Number.isFinite(high);
  expect(finite && low < high, "range()", [low, high], "two finite numbers, the first below the second");
  return [low, high];
}

function checkReward(make) {
  const [low, high] = checkRange(make);
  checkScores(make, episodes(make().constructor), (plugin, make) => plugin.score(make()), low, high);
}

function checkGroupReward(make) {
  const [low, high] = checkRange(make);
  const all = episodes(make().constructor);
  for (const group of [all.slice(0, 1), all.slice(0, 8), all]) {
    const given = () => group.map((item, sampleIndex) => Object.assign(item(), { sampleIndex }));
    const outcomes = make().scoreGroup(given());
    expect(outcomes.length === group.length, `${group.length} episodes`, outcomes, "one result per episode");
    outcomes.forEach((outcome, index) => outcome instanceof Rejection || checkScore(outcome, given()[index], low, high));
    const backwards = make().scoreGroup(given().reverse());
    const same = isDeepStrictEqual(backwards.reverse().map(plain), outcomes.map(plain));
    expect(same, "the same group backwards", backwards, "results that do not depend on the order");
  }
}

function checkStyleScorer(make) {
  const models = [styleModel(), styleModel(undefined, failed()), styleModel({ 售前: 0.75, 售后: 0.25 })];
  const sent = TEXTS.flatMap((text) => models.map((model) => () => [dialogue("在吗", text), model]));
  checkScores(make, sent, (plugin, make) => plugin.score(...make()), 0, 1);
}

/** Checks every score, and that one object for all items gives the same results as a new object per item. */
function checkScores(make, sent, call, low, high) {
  const shared = make();
  for (const item of sent) {
    const [together, alone] = [shared, make()].map((plugin) => attempt(() => call(plugin, item)));
    const same = isDeepStrictEqual(plain(together), plain(alone));
    expect(same, item(), [together, alone], "an item scores the same in a batch and alone: no state between items");
    if (!(alone instanceof Rejection)) checkScore(alone, item(), low, high);
  }
}

function checkScore(score, sent, low, high) {
  const inRange = typeof score?.total === "number" && score.total >= low && score.total <= high;
  expect(inRange, sent, score, `a total from ${low} to ${high}, or a thrown Rejection`);
  expect(Object.keys(score.components ?? {}).length <= 64, sent, score, "at most 64 components");
  for (const [name, value] of Object.entries(score.components ?? {})) {
    expect(/^[a-z0-9_]{1,64}$/.test(name), sent, name, "a component name of 1 to 64 of a to z, 0 to 9 and _");
    expect(Number.isFinite(value), sent, { [name]: value }, "a finite component");
  }
}

function checkFilter(make) {
  const batch = TEXTS.slice(0, 4).flatMap((query) =>
    TEXTS.flatMap((rewrite) => [[], [0.9, 0.2]].map((scores) => () => sample(query, rewrite, scores))),
  );
  const verdicts = () => {
    const filter = make();
    return batch.map((item) => attempt(() => filter.check(item())));
  };
  const first = verdicts();
  first.forEach((verdict, index) => {
    const known = verdict === undefined || verdict instanceof Rejection;
    expect(known, batch[index](), verdict, "nothing for a sample that stays, or a thrown Rejection");
  });
  const same = isDeepStrictEqual(first.map(plain), verdicts().map(plain));
  expect(same, "the same batch twice", "other verdicts", "the same verdicts");
}

function checkPrompt(make) {
  for (const task of TASKS) {
    for (const text of TEXTS) {
      const asked = { query: text, context: { userProfile: undefined, historySummary: undefined }, rewrite: task === "judge" ? text : undefined };
      const roles = make().messages(task, asked).map((message) => message.role);
      const wellFormed = roles.at(-1) === "user" && !roles.slice(1).includes("system");
      expect(wellFormed, { task, ...asked }, roles, "the last message from the user, a system message only at the start");
    }
  }
  for (const text of [...TEXTS, "改写后的查询：胶原蛋白肽", "5", "score: 6", '{"score": 4}']) {
    const rewrite = attempt(() => make().parseRewrite(text));
    const isText = typeof rewrite === "string" && rewrite.trim() !== "";
    expect(isText || rewrite instanceof Rejection, text, rewrite, "a rewrite that is not blank, or a rejection");
    const judged = attempt(() => make().parseJudgement(text));
    const inRange = judged?.score >= 0 && judged.score <= 5;
    expect(inRange || judged instanceof Rejection, text, judged, "a score from 0 to 5, or a rejection");
  }
}

/** Functions that create a new episode, because a plugin may modify its arguments. */
function episodes(type) {
  const sides = [
    () => candidate("胶原蛋白肽的服用方法", [0.9, 0.8, 0.7], { judged: 4.5, style: { 售前: 1 }, nTokens: 9, finishReason: "stop" }),
    () => candidate("胶原蛋白肽", [0]),
    () => candidate(),
    () => candidate("胶原", failed("index down"), { finishReason: "length" }),
    () => candidate("胶原", [1], { judged: failed("judge down"), finishReason: "content_filter" }),
    () => candidate("胶原", Array(50).fill(1), { judged: 0 }),
  ];
  const more = () => ({
    goldIds: ["kb-1"],
    response: "<answer>胶原",
    columns: { text: "文", number: 0.5, flag: true, items: ["a", 1] },
    prompt: [Message.system("改写"), Message.user("胶原咋吃")],
  });
  const paired = sides.flatMap((policy) =>
    [...sides, () => undefined].map((baseline) => () => episode("胶原咋吃", policy(), baseline(), more())),
  );
  const texts = TEXTS.map((text) => () =>
    episode(text, candidate(text.trim() ? text : undefined, [0.5]), sides[0](), { userProfile: text, response: text }),
  );
  return [...paired, ...texts].map((make) => () => declared(make(), type));
}

function plain(answer) {
  return answer instanceof Rejection ? { code: answer.code, detail: answer.detail } : answer;
}

function expect(holds, sent, returned, rule) {
  if (!holds) assert.fail(`the contract expects ${rule}; returned ${shown(returned)}; sent ${shown(sent)}`);
}

function shown(value) {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? String(value));
  return text.length <= 400 ? text : `${text.slice(0, 400)}… (${text.length} characters)`;
}
