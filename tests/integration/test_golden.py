"""Golden answers beside an export, and the script that compares an engine with them: transformers as the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_from_folder import SHORT, folder  # noqa: F401 (a fixture)
from transformers import AutoModelForCausalLM

from nemo_qad.huggingface import compare
from nemo_qad.huggingface.golden import NUM_PROMPTS, places
from nemo_qad.huggingface.stored import decode, is_scale, read_entries

Answer = Callable[[list[int]], torch.Tensor]  # token ids -> log-probabilities [V] of the next


@pytest.fixture(scope="module")
def export(folder: Path) -> Path:  # noqa: F811
    """What a whole run exports; no quantised cache, which transformers does not have."""
    arguments = [f"model.path={folder}", f"run_dir={folder.parent / 'run'}", "model.precision=fp32"]
    arguments += ["evaluation.held_out_samples=64", "recipe.kv_cache=none"]
    status, output = command.run(folder.parent, SHORT, *arguments)
    assert status == 0, output
    return folder.parent / "run/export"


@pytest.fixture(scope="module")
def engine(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers with the weights that the exported files decode to."""
    plain = tmp_path_factory.mktemp("engine") / "model"
    plain.mkdir()
    entries = read_entries(export)
    weights = {
        name: torch.from_numpy(decode(entries, name, 0, entry.shape[0]).copy())
        for name, entry in entries.items()
        if not is_scale(name)
    }
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((export / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def answer_of(model: Any) -> Answer:
    def answer(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)

    return answer


def test_golden_logits_are_those_of_the_decoded_files(export: Path, engine: Any) -> None:
    golden = json.loads((export / "golden/prompts.json").read_text())["prompts"]
    logits = load_file(export / "golden/logits.safetensors")["logits"]
    assert len(golden) == len(logits) == NUM_PROMPTS and logits.dtype == torch.float32
    assert len({len(prompt["ids"]) for prompt in golden}) > 8  # kernels work in blocks, so lengths differ
    for prompt, logits_V in zip(golden, logits, strict=True):
        with torch.no_grad():
            theirs = engine(torch.tensor([prompt["ids"]])).logits[0, -1]
        torch.testing.assert_close(theirs, logits_V, rtol=0, atol=2e-5)
        best = prompt["top"][0]
        assert best["id"] == int(logits_V.argmax()) and len(prompt["top"]) == 64
        assert best["log_prob"] == pytest.approx(float(logits_V.log_softmax(-1).max()), abs=1e-5)
    assert {path.name for path in export.glob("*.safetensors")} == {"model.safetensors"}  # what engines read


class Server:
    """OpenAI's /v1/models and /v1/completions before a model, as engines have them."""

    def __init__(self, answer: Answer, texts: Callable[[int], str] | None = None) -> None:
        def named(values: torch.Tensor, count: int) -> dict[str, float]:
            top = values.topk(count)
            name = texts or (lambda token: f"token_id:{token}")
            return {name(token): value for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if texts is not None and "return_tokens_as_token_ids" in body:
                    return self.reply(422, {"error": "unknown field"})
                assert body["model"] == "served" and body["max_tokens"] == 1 and body["temperature"] == 0
                top = named(answer(body["prompt"]), body["logprobs"])
                return self.reply(200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]})

            def reply(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.url

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def asked(export: Path, *arguments: str) -> tuple[int, str]:
    """The script that ships, run by a bare Python: it may import nothing of ours."""
    command_ = [sys.executable, "-I", "-S", str(export / "golden/compare.py"), *arguments]
    done = subprocess.run(command_, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_an_engine_that_computes_the_model_passes(export: Path, engine: Any) -> None:
    with Server(answer_of(engine)) as url:
        status, output = asked(export, "--url", url)
    assert status == 0, output
    assert "64 prompts: the same most likely token in 100.0 %" in output and "computes the exported model" in output
    kl = float(output.split("KL(student || engine): ")[1].split()[0])
    assert kl < 1e-5


def test_a_server_that_names_tokens_by_text_is_understood(export: Path, engine: Any) -> None:
    known = json.loads((export / "golden/prompts.json").read_text())["prompts"]
    texts = {entry["id"]: entry["text"] for prompt in known for entry in prompt["top"]}
    with Server(answer_of(engine), lambda token: texts.get(token, f"other {token}")) as url:
        status, output = asked(export, "--url", url, "--logprobs", "3")
    assert status == 0, output


def test_an_engine_with_one_wrong_scale_fails(export: Path, engine: Any, tmp_path: Path) -> None:
    """G15: a layer's scale is left out, everything else is right."""
    linear = engine.model.layers[0].mlp.down_proj.weight
    good = linear.detach().clone()
    try:
        with torch.no_grad():
            linear.mul_(30)
        with Server(answer_of(engine)) as url:
            status, output = asked(export, "--url", url)
    finally:
        linear.data.copy_(good)
    assert status == 1 and "does NOT compute" in output, output


def test_answers_from_a_file_and_what_is_wrong_with_one(export: Path, engine: Any, tmp_path: Path) -> None:
    golden = json.loads((export / "golden/prompts.json").read_text())["prompts"]
    answers = []
    for prompt in golden:
        top = answer_of(engine)(prompt["ids"]).topk(10)
        answers.append({str(t): v for t, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)})
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(answers))
    assert asked(export, "--answers", str(file))[0] == 0
    file.write_text(json.dumps(answers[:-1]))
    status, output = asked(export, "--answers", str(file))
    assert status == 2 and "holds 63 answers, not 64" in output
    status, output = asked(export, "--url", "http://127.0.0.1:9/v1")
    assert status == 2 and "no comparison" in output



def test_the_divergence_is_a_lower_bound_that_sees_a_wrong_tail() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.1, 0.3, 0.4, 0.2])
    top = [{"id": i, "log_prob": float(p[i].log())} for i in range(4)]
    full = float((p * (p / q).log()).sum())
    found = compare.divergence({"top": top}, {i: float(q[i].log()) for i in range(4)})
    assert found == pytest.approx(full)
    part = compare.divergence({"top": top}, {0: float(q[0].log()), 1: float(q[1].log())})
    assert 0.3 < part < full
    assert compare.divergence({"top": top}, {i: float(p[i].log()) for i in range(3)}) == pytest.approx(0, abs=1e-6)


def test_prompts_differ() -> None:
    for rows, length in ((64, 128), (256, 32), (16, 64), (3, 128)):
        found = places(rows, length)
        assert len(found) == len(set(found)) == NUM_PROMPTS
        assert all(length // 2 <= last + 1 <= length for _, last in found)


