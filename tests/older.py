"""Reads a model directory with another version of transformers: `python older.py DIRECTORY TEXT
IDS`.

It prints JSON: the version, the token ids of the text as a chat prompt, the log-probs of the token
ids IDS (a JSON list) in float32, and the dtype of the config. It runs in an environment without
lagrpo.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


@torch.no_grad()
def read(directory: str, text: str, ids: list[int]) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    logits = model.float()(input_ids=torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    return {
        "version": transformers.__version__,
        "ids": tokenizer(prompt, add_special_tokens=False)["input_ids"],
        "logprobs": logprobs.tolist(),
        "dtype": str(model.config.torch_dtype),
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    directory, text, ids = sys.argv[1:]
    print(json.dumps(read(directory, text, json.loads(ids))))
