import assert from "node:assert/strict";
import { test } from "node:test";
import { Settings } from "#querl-sdk";
import { checkContract, checkGolden, sample } from "#querl-sdk/testing";
import plugin, { Length } from "../plugin.js";

test("golden cases", () => {
  checkGolden(plugin, new URL("../golden", import.meta.url));
});

test("contract", () => checkContract(plugin));

test("the reason says how long it is and how long it may be", () => {
  const check = () => new Length(new Settings({ max_chars: 3 })).check(sample("鱼油", "深海鱼油"));
  assert.throws(check, { code: "too_long", detail: "4 characters; at most 3 allowed" });
});
