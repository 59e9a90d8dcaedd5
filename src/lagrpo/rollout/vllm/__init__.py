"""The vLLM engine: vLLM servers sample completions over HTTP, with weights that the trainer syncs.

See docs/vllm.md.
"""
