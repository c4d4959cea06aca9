"""Tests of the compute kernels."""
