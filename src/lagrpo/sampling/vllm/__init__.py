"""The vLLM sampler: one or more vLLM servers generate completions, over HTTP, with weights that the trainer syncs.

    sampler.py     the Sampler, put together from these: generation.py (one group by one server), dispatch.py (groups
                   spread over the servers), weights.py (weight sync), fleet.py (servers that die and come back)
    wire.py        how weights travel: a shared directory (directories.py), NCCL (nccl_wire.py), CUDA IPC
    server.py      one server's HTTP interface; process.py starts and ends a server
    connecting.py  from settings to servers and the sampler; serving.py is `lagrpo serve`

vllm itself is never imported: it lives in an environment of its own. docs/vllm.md has the pictures.
"""
