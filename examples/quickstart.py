"""The official OpenAI client against a pdgate: one answer, one stream, and where they came from.

python examples/quickstart.py --url http://localhost:30000
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:30000", help="the gateway (default %(default)s)")
    parser.add_argument("--api-key", default="unused", help="the gateway's --api-key, where it has one")
    args = parser.parse_args()
    with OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key) as client:
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": "Which machine answers me?"}]

        answer = client.chat.completions.with_raw_response.create(model=model, messages=question, max_tokens=16)
        print("answer:", answer.parse().choices[0].message.content)
        print("prefilled on", answer.headers["x-pdgate-prefill"], "and decoded on", answer.headers["x-pdgate-decode"])

        print("stream:", end="")
        for chunk in client.chat.completions.create(model=model, messages=question, max_tokens=16, stream=True):
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
        print(f"why: pdgate explain {answer.headers['x-pdgate-request-id']} --url {args.url}")


if __name__ == "__main__":
    main()
