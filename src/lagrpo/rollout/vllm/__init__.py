"""The vLLM sampler: one or more vLLM servers generate completions, over HTTP, with weights that the trainer syncs.

vllm itself is never imported: it lives in an environment of its own. docs/vllm.md says how to use it.
"""
