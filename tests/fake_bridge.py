"""Stands in for the Python that has `verifiers`, and for the program that it runs there: what is said decides what
happens. It gets the arguments of that Python and ignores them."""

import json
import os
import sys
import time


def answer(**said):
    print(json.dumps(said), flush=True)


given = json.loads(sys.stdin.readline())
options = given["arguments"]
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
if options.get("first"):
    print(options["first"], flush=True)
    sys.exit(3)
answer(ready={"train": 10, "test": options.get("test", 0), "tools": tools if options.get("tools") else []})
steps = {}
for line in sys.stdin:
    request = json.loads(line)
    if "drop" in request:
        steps.pop(request["drop"], None)
        answer(dropped=True)
        continue
    key, said = request.get("start") or request["say"], request.get("content")
    steps[key] = [] if "start" in request else [*steps[key], said]
    if "start" in request:
        answer(
            turn={"messages": [{"role": "user", "content": f"row {request['row']}, {given['name']}"}], "reward": 0.0}
        )
    elif said == "exit":
        os._exit(7)
    elif said == "kill":
        os.kill(os.getpid(), 9)
    elif said == "hang":
        time.sleep(60)
    elif said == "garbage":
        print("\x1b[31mno JSON", flush=True)
    elif said == "deep":
        print("[" * 100_000, flush=True)
    elif said == "strange":
        answer(turn={"messages": "hello", "reward": "much"})
    elif said == "nan":
        answer(final={"reward": float("nan"), "reason": ""})
    elif said == "refuse":
        answer(error="it raised ValueError: broken")
    elif said == "clock":
        answer(turn={"messages": [{"role": "user", "content": str(time.monotonic())}], "reward": 0.0})
    elif said == "end":
        answer(final={"reward": 0.5, "reason": f"after {len(steps[key])} turns; {request['calls']}"})
    else:
        told = f"{len(steps[key])}: {said}, seed {request['seed']}, {request['calls']}"
        answer(turn={"messages": [{"role": "user", "content": told}], "reward": 0.25})
