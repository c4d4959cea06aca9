"""Compute kernels: each a function on tensors, in Rust where the extension module has it, with a twin in torch.

They know nothing of requests, of the engine or of its configuration.
"""
