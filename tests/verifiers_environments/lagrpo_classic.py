"""Environments of verifiers with load_environment, for the tests marked verifiers: they run in the other Python."""

import random

import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"What is {n} + 1?", "answer": str(n + 1), "info": {"n": n}} for n in range(20)])


def correct(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def short(completion) -> float:
    return float(len(completion[-1]["content"]) < 4)


async def broken(completion) -> float:
    if "broken" in completion[-1]["content"]:
        raise RuntimeError("no score today")
    return 0.0


class Guess(vf.MultiTurnEnv):
    """Three tries; the texts decide what happens."""

    async def setup_state(self, state):
        state["secret"] = random.randrange(100)
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == "raise":
            raise RuntimeError("broken")
        if said == "rewrite":
            state["trajectory"][-1]["completion"][-1]["content"] = "something else"
        return [{"role": "user", "content": f"no: {random.randrange(1000)}, secret {state['secret']}"}]

    @vf.stop
    async def found(self, state) -> bool:
        return bool(state["trajectory"]) and correct(state["trajectory"][-1]["completion"], state["answer"]) == 1.0


class CliAgentEnv(vf.SingleTurnEnv):
    """By name one of the package's own, which ask for a sandbox when they are made."""


def best(completions) -> list[float]:
    return [0.0] * len(completions)


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: The first.
        y: The second.
    """
    return x + y


def load_environment(kind="single", system_prompt=None, **further):
    rubric = vf.Rubric(funcs=[correct, short, broken], weights=[1.0, 0.5, 1.0])
    given = {"dataset": ROWS, "system_prompt": system_prompt, "rubric": rubric}
    if kind == "single":
        return vf.SingleTurnEnv(**given, eval_dataset=ROWS.select(range(4)))
    if kind == "turns":
        return Guess(**given, max_turns=3)
    if kind == "tools":
        return vf.ToolEnv(**given, tools=[add], max_turns=4)
    if kind == "judge":
        return vf.SingleTurnEnv(**given | {"rubric": vf.JudgeRubric()})
    if kind == "together":
        return vf.SingleTurnEnv(**given | {"rubric": vf.Rubric(funcs=[best])})
    if kind == "sandbox":
        return CliAgentEnv(**given)
    if kind == "reasoning_gym":
        return vf.ReasoningGymEnv(
            **{"gym": "basic_arithmetic", "num_train_examples": 40, "num_eval_examples": 10} | further
        )
    if kind == "group":
        return vf.EnvGroup([load_environment("single"), load_environment("turns")])
    raise ValueError(f"no kind {kind!r}")
