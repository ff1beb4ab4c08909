"""LlamaIndex, RAGFlow's model class and prompts, and the requests of Dify, with a running `querl serve rewrite`.

    pip install -r tests/serve/requirements-applications.txt
    git clone --depth 1 --branch v0.27.0 https://github.com/infiniflow/ragflow tests/serve/.venv/ragflow
    python3 tests/serve/applications.py http://127.0.0.1:8000 TENANT [--key KEY] [--dify] [--ragflow tests/serve/.venv/ragflow]

`--dify`: the server has an upstream service (`--upstream`). RAGFlow runs from its source, without its databases. FastGPT: fastgpt.mjs.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import types
from importlib.metadata import version
from pathlib import Path

import httpx

# Modules of RAGFlow that need its databases, its tokenizer's index or other kinds of models: replaced by empty modules.
PLACEHOLDERS = {
    "api.db.services.llm_service": ["LLMBundle"],
    "api.db.joint_services.tenant_model_service": ["resolve_model_config", "resolve_model_type"],
    "rag.nlp.rag_tokenizer": [],
    **{f"rag.llm.{kind}_model": [] for kind in ("cv", "embedding", "rerank", "sequence2txt", "tts", "ocr")},
}


def arguments():
    parser = argparse.ArgumentParser(description="Tries LlamaIndex, RAGFlow and Dify's requests against a server.")
    parser.add_argument("url")
    parser.add_argument("tenant")
    parser.add_argument("--key", default="none")
    parser.add_argument("--query", default="它怎么吃")
    parser.add_argument("--history", nargs=2, default=["在看胶原蛋白", "好的"], help="messages of user and assistant")
    parser.add_argument("--dify", action="store_true")
    parser.add_argument("--ragflow", type=Path)
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    return args


def rewrite(args, **context):
    """The rewrite of /v1/rewrite, which the applications must also return."""
    headers = {"Authorization": f"Bearer {args.key}"}
    response = httpx.post(f"{args.url}/v1/rewrite", headers=headers, json={"query": args.query, "tenant": args.tenant, **context})
    assert response.is_success and response.json()["fallback"] is None, response.text
    return response.json()["rewrite"]


def check_llamaindex(args, single, multi_turn):
    from llama_index.core import PromptTemplate
    from llama_index.core.indices.query.query_transform import HyDEQueryTransform
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options = dict(api_base=f"{args.url}/v1", api_key=args.key, is_chat_model=True, max_retries=0)
    rewriter = OpenAILike(model=f"{args.tenant}/rewrite", **options)
    assert rewriter.complete(args.query).text == single
    assert "".join(chunk.delta for chunk in rewriter.stream_complete(args.query)) == single
    roles = ("user", "assistant", "user")
    messages = [ChatMessage(role=role, content=text) for role, text in zip(roles, (*args.history, args.query))]
    assert rewriter.chat(messages).message.content == multi_turn
    assert "".join(chunk.delta for chunk in rewriter.stream_chat(messages)) == multi_turn
    assert asyncio.run(rewriter.achat(messages)).message.content == multi_turn
    # The query that TransformQueryEngine passes to retrievers.
    transform = HyDEQueryTransform(llm=rewriter, hyde_prompt=PromptTemplate("{context_str}"), include_original=False)
    assert transform.run(args.query).embedding_strs == [single]
    own = OpenAILike(model=args.tenant, temperature=0, max_tokens=8, **options)
    assert own.complete(args.query).raw.usage.completion_tokens <= 8


def check_dify(args):
    """The requests of `check_endpoint_and_api_key` and `fetch_external_knowledge_retrieval`, and the fields that Dify reads.

    Source: langgenius/dify, api/services/external_knowledge_service.py at 68d5f223, api/core/helper/ssrf_proxy.py at 79a710ce."""

    def post(key, **request):
        request.setdefault("headers", {})["Authorization"] = f"Bearer {key}"
        with httpx.Client() as client:
            timeout = httpx.Timeout(timeout=5, connect=5, read=5, write=5)
            return client.request("POST", f"{args.url}/retrieval", timeout=timeout, **request)

    refused = (403, 404, 502)
    found = post(args.key)
    assert found.status_code not in refused, found.text
    if args.key != "none":
        found = post(f"{args.key}x")
        assert found.status_code in refused, f"Dify would save a wrong key: {found.status_code} {found.text}"
    for threshold in (0.0, 0.5):
        setting = {"top_k": 2, "score_threshold": threshold}
        body = {"retrieval_setting": setting, "query": args.query, "knowledge_id": args.tenant, "metadata_condition": None}
        headers = {"Content-Type": "application/json"}
        found = post(args.key, headers=headers, content=json.dumps(body), follow_redirects=True)
        assert found.status_code == 200 and "x-querl-fallback" not in found.headers, found.text
        records = found.json().get("records", [])
        assert len(records) <= 2 and (records or threshold > 0), records
        for record in records:
            assert record["content"] and record["title"] and isinstance(record["metadata"], dict), record
            assert threshold <= record["score"] <= 1, record


def load_ragflow(folder):
    """RAGFlow's registries of models, and its prompts."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    logging.disable()  # RAGFlow logs a traceback of each error that it handles.
    # Contains the vocabulary cl100k_base, which RAGFlow would otherwise download.
    os.environ["RAG_PROJECT_BASE"] = str(Path(litellm.__file__).parent / "litellm_core_utils/tokenizers")
    sys.path.insert(0, str(folder.resolve()))
    for name, members in PLACEHOLDERS.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members))
    import rag.llm
    from rag.prompts import generator

    return rag.llm, generator


async def check_ragflow(args, single, multi_turn):
    llm, prompts = load_ragflow(args.ragflow)
    provider, base_url = "OpenAI-API-Compatible", f"{args.url}/v1"
    rewriter, own = f"{args.tenant}/rewrite", args.tenant
    listed = {model["name"]: model["model_types"] for model in await llm.ModelMeta[provider](args.key, base_url).get_model_list()}
    assert listed[rewriter] == listed[own] == ["chat"], listed

    def chat(name):
        # `___OpenAI-API` is what RAGFlow appends to the name in its database.
        return llm.ChatModel[provider](args.key, f"{name}___OpenAI-API", base_url=base_url)

    async def streamed(model, system, messages, settings):
        chunks = [chunk async for chunk in model.async_chat_streamly(system, messages, settings)]
        return "".join(chunks[:-1]), chunks[-1]

    # The check when a model is added (api/apps/services/provider_api_service.py).
    for name in (rewriter, own):
        text, n_tokens = await streamed(chat(name), None, [{"role": "user", "content": "Hi"}], {"temperature": 0.9})
        assert text and "**ERROR**" not in text and n_tokens > 0, (name, text)
    wrong = await chat(f"{own}x").async_chat(None, [{"role": "user", "content": "Hi"}])
    assert wrong[0].startswith("**ERROR**"), wrong

    # A component of an agent: its system prompt and the conversation (agent/component/llm.py).
    settings = {"temperature": 0.1, "top_p": 0.3, "presence_penalty": 0.4, "frequency_penalty": 0.7, "max_tokens": 256, "model_type": "chat"}
    turns = [dict(role=role, content=text) for role, text in zip(("user", "assistant", "user"), (*args.history, args.query))]
    text, n_tokens = await chat(rewriter).async_chat("", turns[-1:], settings)
    assert (text, n_tokens > 0) == (single, True), text
    assert (await chat(rewriter).async_chat("你是一个助手。", list(turns), settings))[0] == multi_turn
    assert (await streamed(chat(rewriter), "", list(turns), settings))[0] == multi_turn

    class Bundle:
        """Replaces RAGFlow's LLMBundle, which needs its database: responses without their number of tokens."""

        max_length = 8192

        def __init__(self, name):
            self.model = chat(name)

        async def async_chat(self, *request):
            answer = (await self.model.async_chat(*request))[0]
            # The prompts of RAGFlow are longer than the context of a small model; other errors are not expected.
            assert "**ERROR**" not in answer or "422" in answer, answer
            return answer

    # Multi-turn optimization and keyword extraction of an assistant, whose prompts have the query in the system message. After an error, such
    # as a prompt that is too long for the model, RAGFlow uses the query without keywords.
    for name in (rewriter, own):
        question = await prompts.full_question(messages=turns, chat_mdl=Bundle(name))
        keywords = await prompts.keyword_extraction(Bundle(name), args.query)
        print(f"RAGFlow with the model {name}: full_question {question!r}, keyword_extraction {keywords!r}")


def main():
    args = arguments()
    single, multi_turn = rewrite(args), rewrite(args, history=args.history)
    check_llamaindex(args, single, multi_turn)
    print(f"llama-index-llms-openai-like {version('llama-index-llms-openai-like')}: ok")
    if args.dify:
        check_dify(args)
        print("requests of Dify: ok" + (", but for a wrong key: no --key" if args.key == "none" else ""))
    if args.ragflow:
        asyncio.run(check_ragflow(args, single, multi_turn))
        print("RAGFlow: ok")
    print(f"{args.query} -> {single}; after {args.history}: {multi_turn}")


main()
