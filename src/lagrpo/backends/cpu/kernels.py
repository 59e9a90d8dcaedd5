"""The door to the C kernels: the forward pass of learner and sampler on a CPU, including its matrix products in
bfloat16, and the backward pass between its matrix products.

    loading    once per process, compiled for the machine before that (build.py); must come before any other call
    functions  the kernels as functions of tensors
    panels     matrix products from packed weights
"""

from lagrpo.backends.cpu.build import NoKernels
from lagrpo.backends.cpu.functions import (
    Active,
    Attended,
    Stack,
    attention,
    attention_backward,
    decode,
    decode_step,
    floats,
    norm,
    norm_backward,
    numbers_in_a_lane,
    rotary,
    sample_tokens,
    swiglu,
    swiglu_backward,
    token_logp,
    token_logp_backward,
)  # fmt: skip
from lagrpo.backends.cpu.library import VECTOR
from lagrpo.backends.cpu.loading import check_level, describe, products, why_not
from lagrpo.backends.cpu.panels import Panels, products_are_right

__all__ = [
    "VECTOR",
    "Active",
    "Attended",
    "NoKernels",
    "Panels",
    "Stack",
    "attention",
    "attention_backward",
    "check_level",
    "decode",
    "decode_step",
    "describe",
    "floats",
    "norm",
    "norm_backward",
    "numbers_in_a_lane",
    "products",
    "products_are_right",
    "rotary",
    "sample_tokens",
    "swiglu",
    "swiglu_backward",
    "token_logp",
    "token_logp_backward",
    "why_not",
]  # fmt: skip
