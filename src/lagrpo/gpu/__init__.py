"""Triton kernels for a GPU: softmax over the vocabulary, norms, activation, rotary embedding, keys."""
