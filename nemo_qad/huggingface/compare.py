"""Compares what a serving engine answers with what the exported model must answer. Needs Python alone.

Start an engine on the checkpoint (vLLM, SGLang, TensorRT-LLM, or anything else with OpenAI's completions), then:

    python golden/compare.py --url http://localhost:8000/v1

Without a server, ask the engine for the next token of each prompt in prompts.json ("ids"), write its most likely tokens
as a JSON list, one object {token id: log-probability} a prompt, and run: python golden/compare.py --answers FILE.

Two figures are printed: how often engine and student agree on the most likely next token, and KL(student || engine) in
nats over the tokens that the engine names and all others as one; that is a lower bound of the KL over all tokens.
The exit status is 1 where either misses its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.error
import urllib.request
from pathlib import Path

LEAST_TOP1 = 0.9  # share of prompts
MOST_KL = 0.05  # nats a token
CLOSE = 0.1  # nats between the two most likely tokens below which another order is no surprise
SMALLEST = 1e-9  # probability that stands for none
TIMEOUT = 300  # seconds for an answer


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; 0: within the limits, 1: not, 2: no comparison was possible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="of the engine's server, ending in /v1")
    source.add_argument("--answers", type=Path, help="JSON file with the engine's log-probabilities")
    parser.add_argument("--golden", type=Path, default=Path(__file__).parent, help="folder of prompts.json")
    parser.add_argument("--model", help="name under which the server has it; default: the only one")
    parser.add_argument("--logprobs", type=int, default=5, help="tokens to ask for; servers limit this (default 5)")
    parser.add_argument("--least-top1", type=float, default=LEAST_TOP1, help=f"share (default {LEAST_TOP1})")
    parser.add_argument("--most-kl", type=float, default=MOST_KL, help=f"nats a token (default {MOST_KL})")
    given = parser.parse_args(argv)
    try:
        golden = json.loads((given.golden / "prompts.json").read_text(encoding="utf-8"))["prompts"]
        answers = _from_server(given, golden) if given.url else _from_file(given.answers, len(golden))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: no comparison: {error!r}", file=sys.stderr)
        return 2
    return _judge(golden, answers, given)


def _judge(golden: list, answers: list, given: argparse.Namespace) -> int:
    divergences, wrong = [], []
    for number, (prompt, answer) in enumerate(zip(golden, answers, strict=True)):
        divergences.append(divergence(prompt, answer))
        first, second = prompt["top"][0], prompt["top"][1]
        guess = max(answer, key=answer.get)
        if guess != first["id"]:
            wrong.append((first["log_prob"] - second["log_prob"], number, first, guess))
    for margin, number, first, guess in sorted(wrong, reverse=True)[:8]:
        student = f"{first['id']} {first['text']!r}"
        print(f"prompt {number}: token {guess}, the student's is {student}, ahead by {margin:.3f} nats")
    agree, kl = 1 - len(wrong) / len(golden), sum(divergences) / len(golden)
    surprising = sum(margin > CLOSE for margin, *_ in wrong)
    print(f"{len(golden)} prompts: the same most likely token in {100 * agree:.1f} %, at least "
          f"{100 * given.least_top1:g} % are asked; {surprising} of {len(wrong)} others are no close call")
    print(f"KL(student || engine): {kl:.5f} nats a token, at most {given.most_kl:g} are allowed; "
          f"the largest is {max(divergences):.4f}")
    good = agree >= given.least_top1 and kl <= given.most_kl
    print("The engine computes the exported model." if good else "The engine does NOT compute the exported model: "
          "check its log for layers that it left out or scales that it did not find, or try another of its kernels.")
    return 0 if good else 1


def divergence(prompt: dict, answer: dict) -> float:
    """KL over the tokens that both name, and all others as one, in nats."""
    known = {entry["id"]: entry["log_prob"] for entry in prompt["top"]}
    shared = [token for token in answer if token in known]
    p = [math.exp(known[token]) for token in shared]
    q = [math.exp(answer[token]) for token in shared]
    p.append(max(1 - math.fsum(p), 0.0))
    q.append(max(1 - math.fsum(q), 0.0))
    return math.fsum(a * math.log(a / max(b, SMALLEST)) for a, b in zip(p, q, strict=True) if a > SMALLEST)


def _from_file(path: Path, count: int) -> list:
    found = json.loads(path.read_text(encoding="utf-8"))
    if len(found) != count:
        raise ValueError(f"{path} holds {len(found)} answers, not {count}")
    return [{int(token): float(value) for token, value in answer.items()} for answer in found]


def _from_server(given: argparse.Namespace, golden: list) -> list:
    model = given.model or _ask(f"{given.url.rstrip('/')}/models")["data"][0]["id"]
    answers = []
    for number, prompt in enumerate(golden):
        body = {"model": model, "prompt": prompt["ids"], "max_tokens": 1, "temperature": 0, "logprobs": given.logprobs}
        try:  # vLLM then names tokens by their ids
            found = _ask(f"{given.url.rstrip('/')}/completions", {**body, "return_tokens_as_token_ids": True})
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            found = _ask(f"{given.url.rstrip('/')}/completions", body)
        logprobs = found["choices"][0]["logprobs"]
        answers.append(_by_id(logprobs["top_logprobs"][0], prompt, number))
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(golden)} prompts", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return answers


def _by_id(logprobs: dict, prompt: dict, number: int) -> dict:
    """Tokens as ids: the server's own, or by their text, of which the most likely token is meant."""
    ids: dict[str, int] = {}
    for entry in prompt["top"]:
        ids.setdefault(entry["text"], entry["id"])
    found = {}
    for position, (token, value) in enumerate(logprobs.items()):
        if token.startswith("token_id:"):
            found[int(token.removeprefix("token_id:"))] = value
        else:
            found[ids.get(token, -1 - position)] = value  # a number that no token has
    if not found:
        raise ValueError(f"the server gave no log-probabilities for prompt {number}; start it with them enabled")
    return found


def _ask(url: str, body: dict | None = None) -> dict:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url}: give http://HOST:PORT/v1")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        found: dict = json.load(answer)
        return found


if __name__ == "__main__":
    sys.exit(main())
