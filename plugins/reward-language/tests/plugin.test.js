import assert from "node:assert/strict";
import { test } from "node:test";
import { Rejection, SettingError, Settings } from "#querl-sdk";
import { checkContract, checkGolden, episode } from "#querl-sdk/testing";
import language, { Language } from "../plugin.js";

const score = (query, rewrite, settings) => new Language(new Settings(settings)).score(episode(query, rewrite)).total;

test("golden cases", () => {
  assert.ok(checkGolden(language, new URL("../golden", import.meta.url)) >= 8);
});

test("contract", () => {
  checkContract(language);
  checkContract(language, { tolerated: 0 });
});

test("a rewrite in each language fits a query in it, and no other", () => {
  const texts = ["鱼油的用量", "fish oil dosage", "魚油の飲み方を教えて", "오메가 복용법", "рыбий жир", "μουρουνέλαιο", "שמן דגים", "زيت السمك", "मछली का तेल", "น้ำมันปลา"];
  for (const query of texts) {
    for (const rewrite of texts) assert.equal(score(query, rewrite), query === rewrite ? 1 : 0, `${query} ${rewrite}`);
  }
});

test("a query without letters is rejected whatever the rewrite", () => {
  for (const query of ["", "123？", "👍"]) {
    assert.throws(() => score(query, "鱼油"), (error) => error instanceof Rejection && error.code === "query_without_letters");
  }
});

test("unusable settings are refused", () => {
  assert.throws(() => new Language(new Settings({ tolerated: 1 })), (error) => error instanceof SettingError && error.key === "tolerated");
});
