"""Our in-process sampler and a vLLM server on the CPU: completion tokens per second. See README.md.

make bench-vllm
python benchmarks/bench_vllm.py --help
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measuring import Load, Report, gigabytes, machine, ratio, spread
from processes import HERE, Program, Side, environment
from work import DTYPE, LONG, WORKS, asked_for, common_options, require_peer, write_prompts

from lagrpo.model.embedded import resolve_model

PROMPTS, TOKENS = 8, 64
GREATEST_DIFFERENCE = (
    0.1  # nats, on average: two implementations, in bfloat16 at the worst, not two models
)
VARIANTS: dict[str, tuple[list[str], bool]] = {
    "compiled": ([], True),
    "eager": (["--enforce-eager"], True),
    "compiled, auto": ([], False),
}
"""How vLLM runs: the model as torch.compile joins it (its default) or operation by operation; with threads on as many
cores as ours, or as it chooses itself (VLLM_CPU_OMP_THREADS_BIND=auto leaves a core to its server: of two, half)."""


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--peer",
        type=Path,
        default=Path(".venv-vllm/bin/python"),
        help="a Python that has vllm-cpu",
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[64, 128], help="completions at a time"
    )
    parser.add_argument("--batches", type=int, default=5, help="of each side and number of rows")
    parser.add_argument("--work", choices=WORKS, default=LONG.name, help="whose prompts")
    return parser.parse_args()


class Server(Program):
    """A vLLM server on this machine alone."""

    def __init__(
        self, variant: str, python: Path, model: str, rows: int, threads: int, scratch: Path
    ) -> None:
        flags, bound = VARIANTS[variant]
        self.model, self.url = model, f"http://127.0.0.1:{(port := free_port())}"
        command = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            port,
            "--dtype",
            DTYPE,
            "--max-model-len",
            2048,
            "--max-num-seqs",
            rows,
            *flags,
        ]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": "",
        }
        if bound:
            settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
                map(str, sorted(os.sched_getaffinity(0))[:threads])
            )
        super().__init__(f"vLLM ({variant})", command, scratch, settings)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self, deadline: float = 1200.0) -> None:
        """Until it answers, then stop it."""
        until = time.monotonic() + deadline
        with self.running():
            while True:
                try:
                    urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                    return
                except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                    if self.process.poll() is not None:
                        raise self.failed("ended") from error
                    if time.monotonic() > until:
                        raise self.failed(f"did not start within {deadline:g} s") from error
                    time.sleep(1)

    def sample(
        self, prompts: list[list[int]], G: int, max_tokens: int
    ) -> tuple[float, list[dict[str, Any]]]:
        """Seconds, and the completions with their log-probs, in the order of the prompts."""
        body = {
            "model": self.model,
            "prompt": prompts,
            "n": G,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,  # of the token that was sampled: what a trainer needs, and what our sampler gives
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with self.running():
            started = time.perf_counter()
            with urllib.request.urlopen(request, timeout=1200) as response:
                answer = json.load(response)
            seconds = time.perf_counter() - started
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return seconds, [
            {
                "prompt": prompts[n // G],
                "token_ids": c["token_ids"],
                "logp": c["logprobs"]["token_logprobs"],
            }
            for n, c in enumerate(choices)
        ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    asked = options()
    require_peer(asked, "vllm-env")
    work = asked_for(WORKS[asked.work], asked)
    tokens, model, load = (8 if asked.quick else TOKENS), resolve_model(asked.model), Load()
    report = Report("vllm", "Samplers: ours and vLLM on the CPU", asked.results)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        scratch = Path(name)
        request = {
            "model": model,
            "prompts": str(write_prompts(work, scratch / "prompts.jsonl")),
            "max_tokens": tokens,
        }
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, HERE / "ours_sampler.py", scratch / "request.json"]
        ours = stack.enter_context(Side("ours", command, scratch, environment(asked.threads)))
        servers = [
            stack.enter_context(
                Server(variant, asked.peer, model, max(asked.rows), asked.threads, scratch)
            )
            for variant in asked.variants
        ]
        report.text(agreement(ours, servers))
        sides = [ours, *servers]
        for rows in asked.rows:
            taken = compared(ours, servers, rows, tokens, asked.batches)
            report.raw[f"{rows} rows"] = taken
            lines = [line(side, taken, rows, tokens) for side in sides]
            report.table(f"{rows} rows × {tokens} tokens, {PROMPTS} prompts ({work.name})", lines)
        load.add(*sides)
        report.write(machine(asked.threads, load, versions(asked.peer)))


def agreement(ours: Side, servers: list[Server]) -> str:
    """That both sides sample from the same model: our log-probs of vLLM's completions against those it states. Raises
    RuntimeError where they do not."""
    found = []
    for server in servers:
        _, completions = server.sample(ours.facts["prompt_ids"][:2], 4, 16)
        scored = ours.ask("score", completions=completions)["logp"]
        differences = [
            abs(a - b)
            for c, own in zip(completions, scored, strict=True)
            for a, b in zip(c["logp"], own, strict=True)
        ]
        mean = sum(differences) / len(differences)
        found.append(
            f"{server.name} {mean:.4f} nats on average over {len(differences)} tokens, {max(differences):.3f} at most"
        )
        if not mean <= GREATEST_DIFFERENCE:
            raise RuntimeError(f"not the same model: log-probs differ by {found[-1]}")
    return f"Log-probs of the same tokens, |ours - vLLM's|: {'; '.join(found)}."


def compared(
    ours: Side, servers: list[Server], rows: int, tokens: int, batches: int
) -> dict[str, list[float]]:
    """Seconds of each side for the same prompts, in turn; every batch has prompts of its own. One before them is not
    counted. Raises RuntimeError where a side generated another number of tokens."""
    G = rows // PROMPTS
    taken: dict[str, list[float]] = {side.name: [] for side in (ours, *servers)}
    for batch in range(batches + 1):
        first = batch * PROMPTS
        for side in (ours, *servers) if batch % 2 == 0 else (*servers, ours):
            if isinstance(side, Server):
                seconds, completions = side.sample(
                    ours.facts["prompt_ids"][first : first + PROMPTS], G, tokens
                )
                generated = sum(len(c["token_ids"]) for c in completions)
            else:
                answer = side.ask("sample", first=first, prompts=PROMPTS, G=G)
                seconds, generated = answer["seconds"], answer["sampled"]
            if generated != rows * tokens:
                raise RuntimeError(f"{side.name} generated {generated} tokens, not {rows * tokens}")
            taken[side.name].append(seconds)
            print(f"  {side.name}, {rows} rows, batch {batch + 1}: {seconds:.2f} s", flush=True)
    return {name: seconds[1:] for name, seconds in taken.items()}


def line(side: Program, taken: Mapping[str, list[float]], rows: int, tokens: int) -> dict[str, str]:
    seconds = taken[side.name]
    return {
        "": side.name,
        "seconds": spread(seconds),
        "tokens per second": spread([rows * tokens / s for s in seconds]),
        "seconds / ours": ratio(seconds, taken["ours"]) if side.name != "ours" else "",
        "most memory resident": gigabytes(side.peak_bytes()),
    }


def versions(python: Path) -> dict[str, str]:
    """Those of the peer's environment."""
    names = ("vllm-cpu", "torch", "transformers")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    environment = os.environ | {"PYTHONPATH": ""}
    return json.loads(
        subprocess.run(
            [python, "-c", code], capture_output=True, check=True, env=environment
        ).stdout
    )


if __name__ == "__main__":
    main()
