// Makes a component of a plugin in JavaScript. The argument is a request as JSON: `entry` (text of the module to start from),
// `bundle` (where the one module made of it goes: line numbers of a stack are its), `component`, `wit`, `world`.

import { componentize } from "@bytecodealliance/componentize-js";
import { build, formatMessages } from "esbuild";
import { writeFile } from "node:fs/promises";

const request = JSON.parse(process.argv[1]);

try {
  await build({
    stdin: { contents: request.entry, resolveDir: process.cwd(), sourcefile: "querl-plugin.js" },
    outfile: request.bundle,
    bundle: true,
    format: "esm",
    platform: "neutral",
    mainFields: ["module", "main"],
    target: "es2022",
    charset: "utf8",
    external: ["querl:*"],
    logLevel: "silent",
  });
  const { component } = await componentize({
    sourcePath: request.bundle,
    witPath: request.wit,
    worldName: request.world,
    disableFeatures: ["http", "fetch-event", "random"],
  });
  await writeFile(request.component, component);
} catch (error) {
  const messages = error.errors ? await formatMessages(error.errors, { kind: "error" }) : [error.message ?? String(error)];
  console.error(messages.join("\n"));
  process.exitCode = 1;
}
