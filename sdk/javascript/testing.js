// Tests of a plugin in plain Node.js. Types and their documentation are in testing.d.ts.

export { candidate, declared, dialogue, episode, failed, hits, sample, styleModel, withHostFunctions } from "./testing/builders.js";
export { checkContract } from "./testing/contract.js";
export { checkGolden, readGolden } from "./testing/golden.js";
export { readEpisodes } from "./testing/json_form.js";
