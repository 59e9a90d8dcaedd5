"""The vLLM sampler: completions sampled by one or more vLLM servers, over HTTP, with weights that the trainer syncs.

    server.py    one server: its HTTP interface, with a deadline on every answer
    backends/process.py   a server that this process starts, watches and ends
    wire.py      how weights get to the servers: a shared directory, NCCL, CUDA IPC
    sampler.py   the Sampler: groups spread over the servers, weight syncs, what happens when a server dies

vllm itself is never imported: it lives in an environment of its own. docs/vllm.md has the pictures.
"""
