"""Completion tokens per second of the local engine and of a vLLM server, on the CPU. See README.md.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from measuring import Load, Report, gigabytes, machine, ratio, spread
from processes import HERE, Program, Side, environment
from work import DTYPE, LONG, WORKS, apply_options, common_options, require_peer, write_prompts

from lagrpo.model.embedded import resolve_model

PROMPTS = 8
TOKENS = 64
# Nats, on average. Two implementations in bfloat16 differ by less, two models by more.
GREATEST_DIFFERENCE = 0.1


@dataclass(frozen=True)
class Variant:
    """A way to run vLLM."""

    flags: tuple[str, ...] = ()
    """Further arguments of the server."""
    has_our_cores: bool = True
    """Has threads on as many cores as lagrpo. Otherwise vLLM chooses:
    VLLM_CPU_OMP_THREADS_BIND=auto leaves a core to the server, of two cores half.
    """


VARIANTS = {
    # With torch.compile, vLLM's default.
    "compiled": Variant(),
    "eager": Variant(flags=("--enforce-eager",)),
    "compiled, auto": Variant(has_our_cores=False),
}


class Completion(TypedDict):
    """A completion that vLLM sampled."""

    prompt: list[int]
    """Token ids."""
    token_ids: list[int]
    logp: list[float]
    """vLLM's log-probs of the tokens."""


def parse_options() -> argparse.Namespace:
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
        port = free_port()
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        arguments = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": DTYPE,
            "--max-model-len": 2048,
            "--max-num-seqs": rows,
        }
        command: list[object] = [python, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            command += [name, value]
        command += VARIANTS[variant].flags
        variables = {
            "HF_HUB_OFFLINE": "1",
            # GB. 128 rows of 264 tokens of SmolLM2 in bfloat16 take .8.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            # The server must import its own packages only.
            "PYTHONPATH": "",
        }
        if VARIANTS[variant].has_our_cores:
            cores = sorted(os.sched_getaffinity(0))[:threads]
            variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        super().__init__(f"vLLM ({variant})", command, scratch, variables)
        try:
            self._wait()
        except BaseException:
            # `with` calls __exit__ only if the constructor has returned.
            self.__exit__()
            raise

    def _wait(self, deadline: float = 1200.0) -> None:
        """Waits until the server answers, then stops it. Raises RuntimeError after the deadline."""
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
    ) -> tuple[float, list[Completion]]:
        """Samples G completions per prompt. Returns seconds and completions, in order."""
        body = {
            "model": self.model,
            "prompt": prompts,
            "n": G,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            # Every completion has max_tokens tokens, as on our side.
            "ignore_eos": True,
            # 0 further tokens: only the sampled token, as a trainer needs and our sampler returns.
            "logprobs": 0,
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
        # vLLM numbers choices by prompt: choice i belongs to prompt i // G.
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        completions: list[Completion] = [
            {
                "prompt": prompts[number // G],
                "token_ids": choice["token_ids"],
                "logp": choice["logprobs"]["token_logprobs"],
            }
            for number, choice in enumerate(choices)
        ]
        return seconds, completions


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    options = parse_options()
    require_peer(options, "vllm-env")
    work = apply_options(WORKS[options.work], options)
    tokens = 8 if options.quick else TOKENS
    model = resolve_model(options.model)
    load = Load()
    report = Report("vllm", "Samplers: ours and vLLM on the CPU", options.results)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        scratch = Path(name)
        request = {
            "model": model,
            "prompts": str(write_prompts(work, scratch / "prompts.jsonl")),
            "max_tokens": tokens,
        }
        request_path = scratch / "request.json"
        request_path.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, HERE / "ours_sampler.py", request_path]
        ours = stack.enter_context(Side("ours", command, scratch, environment(options.threads)))
        servers = []
        for variant in options.variants:
            most_rows = max(options.rows)
            # One server for all numbers of rows: --max-num-seqs is only a limit.
            server = Server(variant, options.peer, model, most_rows, options.threads, scratch)
            servers.append(stack.enter_context(server))
        report.text(compare_log_probs(ours, servers))
        sides = [ours, *servers]
        for rows in options.rows:
            seconds = measure(ours, servers, rows, tokens, options.batches)
            report.raw[f"{rows} rows"] = seconds
            lines = [line(side, seconds, rows, tokens) for side in sides]
            report.table(f"{rows} rows × {tokens} tokens, {PROMPTS} prompts ({work.name})", lines)
        load.add(*sides)
        report.write(machine(options.threads, load, versions(options.peer)))


def compare_log_probs(ours: Side, servers: list[Server]) -> str:
    """Compares our log-probs of vLLM's completions with those that vLLM returned.

    Raises RuntimeError if they differ so much that the sides cannot have the same model.
    """
    differences_text = []
    for server in servers:
        # Up to 128 tokens: enough to tell another model from rounding.
        _, completions = server.sample(ours.facts["prompt_ids"][:2], 4, 16)
        our_logps = ours.ask("score", completions=completions)["logp"]
        differences = [
            abs(theirs - our_value)
            for completion, our_logp in zip(completions, our_logps, strict=True)
            for theirs, our_value in zip(completion["logp"], our_logp, strict=True)
        ]
        mean = sum(differences) / len(differences)
        text = (
            f"{server.name} {mean:.4f} nats on average over {len(differences)} tokens, "
            f"{max(differences):.3f} at most"
        )
        differences_text.append(text)
        # `not <=` so that NaN fails, too.
        if not mean <= GREATEST_DIFFERENCE:
            raise RuntimeError(f"not the same model: log-probs differ by {text}")
    return f"Log-probs of the same tokens, |ours - vLLM's|: {'; '.join(differences_text)}."


def measure(
    ours: Side, servers: list[Server], rows: int, tokens: int, batches: int
) -> dict[str, list[float]]:
    """Seconds of each side for the same prompts, in turn, after one batch that does not count.

    Every batch has prompts of its own. Raises RuntimeError if a side generates another number of
    tokens.
    """
    G = rows // PROMPTS
    seconds: dict[str, list[float]] = {side.name: [] for side in (ours, *servers)}
    for batch in range(batches + 1):
        first = batch * PROMPTS
        for side in (ours, *servers) if batch % 2 == 0 else (*servers, ours):
            if isinstance(side, Server):
                prompts = ours.facts["prompt_ids"][first : first + PROMPTS]
                batch_seconds, completions = side.sample(prompts, G, tokens)
                generated = sum(len(completion["token_ids"]) for completion in completions)
            else:
                reply = side.ask("sample", first=first, prompts=PROMPTS, G=G)
                batch_seconds = reply["seconds"]
                generated = reply["sampled"]
            if generated != rows * tokens:
                raise RuntimeError(f"{side.name} generated {generated} tokens, not {rows * tokens}")
            seconds[side.name].append(batch_seconds)
            print(
                f"  {side.name}, {rows} rows, batch {batch + 1}: {batch_seconds:.2f} s", flush=True
            )
    return {name: side_seconds[1:] for name, side_seconds in seconds.items()}


def line(
    side: Program, seconds: Mapping[str, list[float]], rows: int, tokens: int
) -> dict[str, str]:
    """The row of a side."""
    side_seconds = seconds[side.name]
    return {
        "": side.name,
        "seconds": spread(side_seconds),
        "tokens per second": spread([rows * tokens / value for value in side_seconds]),
        "seconds / ours": ratio(side_seconds, seconds["ours"]) if side.name != "ours" else "",
        "most memory resident": gigabytes(side.peak_bytes()),
    }


def versions(python: Path) -> dict[str, str]:
    """Versions of packages in the peer's environment."""
    names = ("vllm-cpu", "torch", "transformers")
    code = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    )
    variables = os.environ | {"PYTHONPATH": ""}
    finished = subprocess.run([python, "-c", code], capture_output=True, check=True, env=variables)
    return json.loads(finished.stdout)


if __name__ == "__main__":
    main()
