// The requests of FastGPT to a running `querl serve rewrite`, with the npm package that FastGPT uses (4.61.0; newer versions: 6.30.1).
//
//   npm install --no-save --no-package-lock --prefix tests/serve openai@4.61.0 json5@2.2.3
//   git clone --depth 1 https://github.com/labring/FastGPT tests/serve/.venv/fastgpt
//   node tests/serve/fastgpt.mjs http://127.0.0.1:8000 TENANT [KEY [tests/serve/.venv/fastgpt]]
//
// The clone is for the prompts of query extension. Source: labring/FastGPT, packages/service/core/ai: config.ts, llm/request and
// functions/queryExtension.ts.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import JSON5 from 'json5';
import OpenAI from 'openai';

const [url, tenant, key = 'none', folder] = process.argv.slice(2);
const query = '它怎么吃';
const history = ['在看胶原蛋白', '好的'];
const turns = [
  { role: 'user', content: history[0] },
  { role: 'assistant', content: history[1] },
  { role: 'user', content: query }
];

// A custom model has its own address and key, instead of those of the gateway.
async function request(model, body) {
  const client = new OpenAI({ baseURL: 'http://127.0.0.1:9/v1', apiKey: 'gateway', timeout: 600000, maxRetries: 2 });
  const options = {
    path: `${url}/v1/chat/completions`,
    headers: { Accept: 'application/json, text/plain, */*', Authorization: `Bearer ${key}` }
  };
  const response = await client.chat.completions.create({ model, ...body }, options);
  if (!body.stream) return { text: response.choices[0].message.content, reason: response.choices[0].finish_reason };
  let text = '';
  let reason = null;
  for await (const part of response) {
    text += part.choices[0]?.delta?.content ?? '';
    reason = part.choices[0]?.finish_reason ?? reason;
  }
  return { text, reason };
}

// The node "AI chat": the conversation, without a system prompt.
async function aiChat() {
  const response = await fetch(`${url}/v1/rewrite`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', Authorization: `Bearer ${key}` },
    body: JSON.stringify({ tenant, query, history })
  });
  const answer = await response.json();
  assert.ok(response.ok && answer.fallback === null, JSON.stringify(answer));
  const { rewrite } = answer;
  for (const stream of [true, false]) {
    const body = { stream, messages: turns, temperature: 0, max_tokens: 2000 };
    assert.deepEqual(await request(`${tenant}/rewrite`, body), { text: rewrite, reason: 'stop' });
  }
  return rewrite;
}

// Query extension of a knowledge base search: FastGPT searches the query and the texts in the array of the response.
async function queryExtension(model) {
  const source = readFileSync(`${folder}/packages/service/core/ai/functions/queryExtension.ts`, 'utf8');
  const template = (pattern) => source.match(pattern)?.[1] ?? assert.fail(`no prompt ${pattern} in queryExtension.ts`);
  const system = template(/queryExtensionSystemPrompt = (`[^`]*`)/);
  const user = template(/buildQueryExtensionUserPrompt[^`]*(`[^`]*`)/);
  const render = (text) => new Function('chatBg', 'histories', 'query', 'count', `return ${text}`)('', histories, query, 10);
  const histories = turns.slice(0, -1).map(({ role, content }) => `${role}: ${content}`).join('\n');
  const messages = [
    { role: 'system', content: render(system) },
    { role: 'user', content: render(user) }
  ];
  // On an error or a response that it cannot parse, FastGPT logs it and searches the query.
  let answer;
  let found = [];
  try {
    answer = (await request(model, { stream: true, temperature: 0.1, messages })).text;
    const [start, end] = [answer.indexOf('['), answer.lastIndexOf(']')];
    if (start >= 0 && end >= 0) found = JSON5.parse(answer.slice(start, end + 1));
  } catch (error) {
    const tooLong = error instanceof OpenAI.APIError && error.status === 422;
    if (!(tooLong || error instanceof SyntaxError)) throw error;
    answer ??= error.message;
  }
  assert.deepEqual(found, [], 'docs/serving.md says that FastGPT searches the query alone');
  console.log(`query extension with the model ${model}: ${answer}; FastGPT searches ${JSON.stringify([query, ...found])}`);
}

const rewrite = await aiChat();
console.log(`AI chat: ${query} after ${JSON.stringify(history)} -> ${rewrite}`);
if (folder) {
  await queryExtension(`${tenant}/rewrite`);
  await queryExtension(tenant);
}
console.log('requests of FastGPT: ok');
