"""The vLLM sampler: completions drawn by one or more vLLM servers, over HTTP, by weights that the trainer delivers.

    server.py    one server: its HTTP interface, with a deadline on every answer
    backends/process.py   a server that this process starts, watches and ends
    wire.py      how weights get to the servers: a shared directory, NCCL, CUDA IPC
    sampler.py   the Sampler: groups spread over the servers, deliveries, what happens when a server dies

vllm itself is never imported: it lives in an environment of its own. docs/vllm.md has the pictures.
"""
