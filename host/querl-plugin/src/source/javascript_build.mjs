// Makes a component of a plugin in JavaScript. The argument is a request as JSON: `entry` (text of the module to start from),
// `bundle` (where the one module made of it goes: line numbers of a stack are its), `component`, `wit`, `world`.

import { componentize } from "@bytecodealliance/componentize-js";
import { build, formatMessages } from "esbuild";
import { existsSync } from "node:fs";
import { readFile, writeFile } from "node:fs/promises";
import { basename } from "node:path";

const request = JSON.parse(process.argv[1]);

// The snapshot of the engine keeps the path of the folder that componentize-js works in, which is one for temporary files. Nobody's own
// folder shall become part of the component.
if (process.platform !== "win32" && existsSync("/tmp")) process.env.TMPDIR = "/tmp";

// componentize-js 0.23 measures each text that leaves the component by a loop in JavaScript, a thousand instructions a character: a third of
// the cost of a reward. The engine's own encoder gives the same bytes. Bindings of another form stay as they are.
const lib = new URL("../lib/spidermonkey-embedding-splicer.js", import.meta.resolve("@bytecodealliance/componentize-js"));
const { splicer } = await import(lib);
const { spliceBindings } = splicer;
const MEASURED = /let len = 0;\s+let codepoints = 0;[^]*?const res = \{ ptr, len, codepoints \};\s+return res;/;
const ENCODED = `const bytes = TEXT_ENCODER_UTF8.encode(s);
  const ptr = realloc(0, 0, 1, bytes.length);
  new Uint8Array(memory.buffer, ptr, bytes.length).set(bytes);
  return { ptr, len: bytes.length };`;
splicer.spliceBindings = (...request) => {
  const spliced = spliceBindings(...request);
  return { ...spliced, jsBindings: spliced.jsBindings.replace(MEASURED, ENCODED) };
};

// esbuild names the file above its lines; of a file outside of the folder, only the name stays.
const withoutFolders = (text) => text.replaceAll(/^\/\/ (?:\.\.\/|\/|[A-Za-z]:).*$/gm, (line) => `// ${basename(line)}`);

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
  const source = withoutFolders(await readFile(request.bundle, "utf8"));
  await writeFile(request.bundle, source);
  const { component } = await componentize(source, {
    sourceName: basename(request.bundle),
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
