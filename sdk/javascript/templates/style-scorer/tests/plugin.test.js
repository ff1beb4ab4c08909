import assert from "node:assert/strict";
import { test } from "node:test";
import { Settings } from "#querl-sdk";
import { checkContract, checkGolden, dialogue, failed, styleModel } from "#querl-sdk/testing";
import plugin, { OneStyle } from "../plugin.js";

test("golden cases", () => {
  checkGolden(plugin, new URL("../golden", import.meta.url));
});

test("contract", () => checkContract(plugin));

test("a model that fails or lacks the class gives no score", () => {
  const score = (model) => new OneStyle(new Settings({ label: "投诉" })).score(dialogue("在吗", "在的"), model);
  assert.throws(() => score(styleModel(undefined, failed())), { code: "no_style" });
  assert.throws(() => score(styleModel({ 售前: 1 })), { code: "unknown_class" });
});
