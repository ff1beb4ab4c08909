"""The OpenAI client and LangChain with a running `querl serve rewrite`.

    pip install -r tests/serve/requirements.txt
    python3 tests/serve/clients.py http://127.0.0.1:8000 TENANT [--key KEY] [--query TEXT]
"""

import argparse
import asyncio
import json
import urllib.request

import openai
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI


def arguments():
    parser = argparse.ArgumentParser(description="Tries the OpenAI client and LangChain against a server.")
    parser.add_argument("url")
    parser.add_argument("tenant")
    parser.add_argument("--key", default="none")
    parser.add_argument("--query", default="胶原蛋白怎么吃")
    return parser.parse_args()


def rewrite(args):
    """The rewrite of /v1/rewrite, which the other protocols must also return."""
    body = json.dumps({"query": args.query, "tenant": args.tenant}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{args.url}/v1/rewrite", body, headers)) as response:
        found = json.load(response)
    assert found["fallback"] is None, found
    return found["rewrite"]


def check_openai(args, expected):
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.key, max_retries=0)
    models = [model.id for model in client.models.list()]
    assert args.tenant in models and f"{args.tenant}/rewrite" in models, models

    messages = [{"role": "user", "content": args.query}]
    create = client.chat.completions.create
    whole = create(model=f"{args.tenant}/rewrite", messages=messages)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop", whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole._request_id, "x-request-id"

    usage = {"include_usage": True}
    chunks = list(create(model=f"{args.tenant}/rewrite", messages=messages, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]

    parts = [{"role": "system", "content": "改写查询。"}, {"role": "user", "content": [{"type": "text", "text": args.query}]}]
    own = create(model=args.tenant, messages=parts, max_completion_tokens=8, temperature=0)
    assert own.usage.completion_tokens <= 8
    streamed = list(create(model=args.tenant, messages=parts, max_tokens=8, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == own.choices[0].message.content, (text, own)
    assert streamed[-1].choices[0].finish_reason == own.choices[0].finish_reason
    # The helper merges the deltas. It raises an error if the length limit was reached, which a model that needs more than 8 tokens does.
    with client.chat.completions.stream(model=args.tenant, messages=parts, max_tokens=8, temperature=0) as stream:
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as reached:
            final = reached.completion
    assert (final.choices[0].message.role, final.choices[0].message.content) == ("assistant", text), final
    options = dict(top_p=0.9, seed=7, stop=["\n"], n=1, user="somebody", frequency_penalty=0.5)
    create(model=args.tenant, messages=messages, temperature=0.7, max_tokens=4, **options)

    def error(kind, **changes):
        try:
            create(**{"model": args.tenant, "messages": messages, **changes})
        except kind as found:
            return found
        raise AssertionError(f"no {kind} for {changes}")

    unknown = error(openai.NotFoundError, model=f"{args.tenant}x")
    assert (unknown.code, unknown.param) == ("model_not_found", "model"), unknown
    assert error(openai.UnprocessableEntityError, n=2).param == "n"
    assert error(openai.UnprocessableEntityError, messages=[]).param == "messages"

    async def together():
        client = openai.AsyncOpenAI(base_url=f"{args.url}/v1", api_key=args.key, max_retries=0)
        ask = client.chat.completions.create
        answers = await asyncio.gather(*(ask(model=f"{args.tenant}/rewrite", messages=messages) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {expected}
        # Leaving a stream early closes its connection; the server then cancels the generation.
        async with await ask(model=args.tenant, messages=messages, max_tokens=8, stream=True) as stream:
            async for _ in stream:
                break

    asyncio.run(together())


def check_langchain(args, expected):
    options = dict(base_url=f"{args.url}/v1", api_key=args.key, max_retries=0)
    rewriter = ChatOpenAI(model=f"{args.tenant}/rewrite", **options)
    whole = rewriter.invoke(args.query)
    assert whole.content == expected and whole.usage_metadata["input_tokens"] > 0, whole
    assert "".join(chunk.content for chunk in rewriter.stream(args.query)) == expected
    assert [answer.content for answer in rewriter.batch([args.query] * 3)] == [expected] * 3
    history = [HumanMessage("在看鱼油"), AIMessage("好的"), HumanMessage(args.query)]
    assert rewriter.invoke(history).content
    own = ChatOpenAI(model=args.tenant, temperature=0, max_tokens=8, stop=["\n"], **options)
    chain = own | (lambda message: message.content)
    assert chain.invoke([("system", "改写查询。"), ("human", args.query)]) is not None
    assert asyncio.run(rewriter.ainvoke(args.query)).content == expected


def main():
    args = arguments()
    args.url = args.url.rstrip("/")
    expected = rewrite(args)
    check_openai(args, expected)
    print(f"openai {openai.__version__}: ok")
    check_langchain(args, expected)
    print("langchain-openai: ok")
    print(f"{args.query} -> {expected}")


main()
